"""Pieces of an answer as the deltas and messages of chat completions; leaves their envelope to render.chat."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from services.tokenizer.tools.pieces import CallArguments, CallStart, Parsed, Piece, Text, Thought

Delta = dict[str, Any]


def deltas(pieces: Iterable[Piece]) -> list[Delta]:
    """One delta for each piece; texts that follow each other are one."""
    made: list[Delta] = []
    for piece in pieces:
        delta = _delta(piece)
        if delta is None:
            continue
        if made and delta.keys() == made[-1].keys() and "tool_calls" not in delta:
            [key] = delta
            made[-1][key] += delta[key]
        else:
            made.append(delta)
    return made


def _delta(piece: Piece) -> Delta | None:
    match piece:
        case Text(text):
            return {"content": text}
        case Thought(text):
            return {"reasoning_content": text}
        case CallStart(index, id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return None


def message(parsed: Parsed, *, with_reasoning: bool) -> dict[str, Any]:
    """The assistant's message; its content is null where there are only calls."""
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in parsed.calls
    ]
    content = parsed.text if parsed.text or not calls else None
    reasoning = {"reasoning_content": parsed.thought or None} if with_reasoning else {}
    return {"role": "assistant", "content": content, "refusal": None, **reasoning, "tool_calls": calls or None}


def finish_reason(reason: str | None, calls: int) -> str | None:
    """An answer that ends by itself and made calls waits for their results."""
    return "tool_calls" if calls and reason == "stop" else reason
