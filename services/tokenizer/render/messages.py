"""The words of /v1/messages: content blocks, and the stream of events that builds them; leaves sending to the exchange.

message_start  content_block_start  content_block_delta ...  content_block_stop  message_delta  message_stop
"""

from __future__ import annotations

from typing import Any

import msgspec

from services.tokenizer import sse
from services.tokenizer.output import Output
from services.tokenizer.render.usage import Counts
from services.tokenizer.tools.pieces import CallArguments, CallEnd, CallStart, Piece, Text, Thought
from services.tokenizer.tools.reader import Reading
from shared.messages.stream import Finish, FinishReason

Event = dict[str, Any]
Block = dict[str, Any]


class MessagesAnswerer:
    """One message."""

    def __init__(self, message_id: str, model: str, counts: Counts, reading: Reading) -> None:
        self._id = message_id
        self._model = model
        self._counts = counts
        self._reader = reading.open()
        self._blocks: list[Block] = []
        self._open = False  # the last block still grows
        self._arguments: list[str] = []  # of the call at hand
        self._finish: Finish | None = None
        self._begun = False

    def event(self, index: int, news: Output) -> bytes:
        events = self._read(news)
        if not self._begun:
            self._begun = True
            message = {**self._message(), "content": [], "stop_reason": None, "stop_sequence": None}
            events.insert(0, {"type": "message_start", "message": message})
        return _told(events)

    def end(self) -> bytes:
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence()}
        return _told([{"type": "message_delta", "delta": delta, "usage": self._usage()}, {"type": "message_stop"}])

    def whole(self, outputs: list[Output]) -> bytes:
        self._read(outputs[0])
        return sse.json_bytes(self._message())

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._blocks,
            "stop_reason": self._stop_reason(),
            "stop_sequence": self._stop_sequence(),
            "usage": self._usage(),
        }

    def _read(self, news: Output) -> list[Event]:
        self._counts.note(0, news.num_output_tokens, news.cached_tokens)
        pieces = self._reader.feed(news.text, news.token_ids)
        if news.finish is not None:
            pieces += self._reader.finish()
        self._counts.note_reasoning(0, self._reader.reasoning_tokens)
        events = [event for piece in pieces for event in self._take(piece)]
        if news.finish is not None:
            self._finish = news.finish
            events += self._close()
        return events

    def _take(self, piece: Piece) -> list[Event]:
        match piece:
            case Text(text):
                return self._grow("text", text, {"type": "text", "text": ""})
            case Thought(text):
                return self._grow("thinking", text, {"type": "thinking", "thinking": "", "signature": ""})
            case CallStart(_, id, name):
                self._arguments = []
                return [*self._close(), self._start({"type": "tool_use", "id": id, "name": name, "input": {}})]
            case CallArguments(_, text):
                self._arguments.append(text)
                return [self._delta({"type": "input_json_delta", "partial_json": text})]
            case CallEnd():
                return self._close()

    def _grow(self, kind: str, text: str, blank: Block) -> list[Event]:
        events = []
        if not self._open or self._blocks[-1]["type"] != kind:
            events = [*self._close(), self._start(blank)]
        self._blocks[-1][kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _start(self, block: Block) -> Event:
        self._blocks.append(block)
        self._open = True
        return {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[Event]:
        if not self._open:
            return []
        self._open = False
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = _input("".join(self._arguments))
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _stop_reason(self) -> str | None:
        finish = self._finish
        if finish is None:
            return None
        if finish.reason is FinishReason.LENGTH:
            return "max_tokens"
        if finish.reason is not FinishReason.STOP:
            return "pause_turn"  # aborted from outside: what there is may be continued
        if finish.matched_string:
            return "stop_sequence"
        return "tool_use" if self._reader.calls else "end_turn"

    def _stop_sequence(self) -> str | None:
        return (self._finish.matched_string or None) if self._finish is not None else None

    def _usage(self) -> dict[str, Any]:
        """Tokens read from the cache are not part of input_tokens here."""
        counts = self._counts
        return {
            "input_tokens": counts.prompt_tokens - counts.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": counts.cached_tokens,
            "output_tokens": counts.completion_tokens,
        }


def _told(events: list[Event]) -> bytes:
    return b"".join(sse.named(event["type"], event) for event in events)


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as an object; empty where the answer was cut within them."""
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return {}
