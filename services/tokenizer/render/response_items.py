"""The output items of a response as they grow, and the events that tell of it; leaves the response to responses.

output_item.added  content_part.added  output_text.delta ...  output_text.done  content_part.done  output_item.done
output_item.added  function_call_arguments.delta ...  function_call_arguments.done  output_item.done
"""

from __future__ import annotations

import secrets
from typing import Any

from services.tokenizer.tools.pieces import CallArguments, CallEnd, CallStart, Piece, Text, Thought

Event = dict[str, Any]
Item = dict[str, Any]
_DELTAS = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


class Items:
    """The items of one response. Every method gives the events of what it did."""

    def __init__(self) -> None:
        self.done: list[Item] = []
        self._open: Item | None = None
        self._text: list[str] = []
        self._scores: list[Any] = []

    def take(self, piece: Piece, scores: list[Any]) -> list[Event]:
        """One piece more; `scores` are log-probabilities of its tokens, for text."""
        match piece:
            case Text(text):
                return self._write("message", text, scores)
            case Thought(text):
                return self._write("reasoning", text, [])
            case CallStart(_, id, name):
                events = self.close()
                call = {"call_id": id, "name": name, "arguments": ""}
                return [*events, *self._begin("function_call", **call)]
            case CallArguments(_, text):
                self._text.append(text)
                return [self._event("response.function_call_arguments.delta", delta=text)]
            case CallEnd():
                return self.close()

    def close(self, status: str = "completed") -> list[Event]:
        """The open item is over."""
        item = self._open
        if item is None:
            return []
        events = self._close_call(item) if item["type"] == "function_call" else self._close_text(item)
        item["status"] = status
        events.append(self._event("response.output_item.done", item=item))
        self.done.append(item)
        self._open = None
        return events

    def _begin(self, kind: str, **fields: Any) -> list[Event]:
        id = f"{_PREFIXES[kind]}_{secrets.token_hex(16)}"
        self._open = {"id": id, "type": kind, "status": "in_progress", **fields}
        self._text, self._scores = [], []
        return [self._event("response.output_item.added", item=dict(self._open))]

    def _write(self, kind: str, text: str, scores: list[Any]) -> list[Event]:
        events = []
        if self._open is None or self._open["type"] != kind:
            fields: Item = {"content": []}
            fields |= {"role": "assistant"} if kind == "message" else {"summary": list[Any]()}
            events = [*self.close(), *self._begin(kind, **fields)]
            events.append(self._event("response.content_part.added", content_index=0, part=_part(kind, "", [])))
        self._text.append(text)
        self._scores += scores
        told = {"logprobs": scores} if kind == "message" else {}
        return [*events, self._event(f"response.{_DELTAS[kind]}.delta", content_index=0, delta=text, **told)]

    def _close_text(self, item: Item) -> list[Event]:
        kind, text = item["type"], "".join(self._text)
        part = _part(kind, text, self._scores)
        item["content"] = [part]
        told = {"logprobs": self._scores} if kind == "message" else {}
        return [
            self._event(f"response.{_DELTAS[kind]}.done", content_index=0, text=text, **told),
            self._event("response.content_part.done", content_index=0, part=part),
        ]

    def _close_call(self, item: Item) -> list[Event]:
        item["arguments"] = "".join(self._text)
        done = self._event("response.function_call_arguments.done", name=item["name"], arguments=item["arguments"])
        return [done]

    def _event(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        own = {} if "item" in fields else {"item_id": self._open["id"]}
        return {"type": kind, "output_index": len(self.done), **own, **fields}


def _part(kind: str, text: str, scores: list[Any]) -> Item:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scores}


def as_message(items: list[Item]) -> dict[str, Any]:
    """The assistant's turn as chat templates read it."""
    calls = [
        {
            "id": item["call_id"],
            "type": "function",
            "function": {"name": item["name"], "arguments": item["arguments"]},
        }
        for item in items
        if item["type"] == "function_call" and item["status"] == "completed"
    ]
    texts = {
        kind: "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])
        for kind in _DELTAS
    }
    message: dict[str, Any] = {"role": "assistant", "content": texts["message"]}
    if texts["reasoning"]:
        message["reasoning_content"] = texts["reasoning"]
    if calls:
        message["tool_calls"] = calls
    return message
