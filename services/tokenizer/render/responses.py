"""The words of /v1/responses: the response object and its stream of numbered events. Leaves items to response_items.

response.created  response.in_progress  ...items...  response.completed | incomplete | failed
"""

from __future__ import annotations

import time
from typing import Any

from services.tokenizer import sse
from services.tokenizer.errors import ApiError
from services.tokenizer.output import Output
from services.tokenizer.render.logprobs import chat_content
from services.tokenizer.render.response_items import Event, Items
from services.tokenizer.render.usage import Counts
from services.tokenizer.tools.reader import Reading
from services.tokenizer.vocabulary import Vocabulary
from shared.messages.stream import Finish, FinishReason

_STATUS = {FinishReason.STOP: "completed", FinishReason.LENGTH: "incomplete"}


class ResponsesAnswerer:
    """One response. `head` holds the fields that only repeat the request."""

    def __init__(
        self,
        head: dict[str, Any],
        counts: Counts,
        reading: Reading,
        vocabulary: Vocabulary,
        *,
        with_logprobs: bool,
    ) -> None:
        self._head = head
        self._counts = counts
        self._reader = reading.open()
        self._vocabulary = vocabulary
        self._with_logprobs = with_logprobs
        self._items = Items()
        self._sequence = 0
        self._begun = False
        self._scores: list[Any] = []  # of tokens whose text is still held back
        self._status = "in_progress"
        self._finish: Finish | None = None
        self._created = int(time.time())

    @property
    def items(self) -> list[dict[str, Any]]:
        """The items that are complete."""
        return self._items.done

    @property
    def is_final(self) -> bool:
        """The engine has ended it by itself: what failed or was cancelled is not kept."""
        return self._status in ("completed", "incomplete")

    def event(self, index: int, news: Output) -> bytes:
        return self._begin() + self._tell(self._read(news))

    def end(self) -> bytes:
        kind = "completed" if self._status == "completed" else "incomplete"
        return self._begin() + self._tell([{"type": f"response.{kind}", "response": self.response()}])

    def whole(self, outputs: list[Output]) -> bytes:
        self._read(outputs[0])
        return sse.json_bytes(self.response())

    def fail(self, error: ApiError) -> bytes:
        """The end of a stream whose answer cannot be finished."""
        self._status = "failed"
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        events = self._items.close("incomplete")
        failed = {**self.response(), "error": {"code": code, "message": error.message}}
        return self._begin() + self._tell([*events, {"type": "response.failed", "response": failed}])

    def response(self) -> dict[str, Any]:
        """The object as it is now."""
        reason = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        running = self._status == "in_progress"
        return {
            **self._head,
            "created_at": self._created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "error": None,
            "incomplete_details": reason,
            "output": self._items.done,
            "usage": None if running else self._usage(),
        }

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        status, self._status = self._status, "in_progress"
        blank = {**self.response(), "output": []}
        self._status = status
        return self._tell([{"type": f"response.{kind}", "response": blank} for kind in ("created", "in_progress")])

    def _read(self, news: Output) -> list[Event]:
        self._counts.note(0, news.num_output_tokens, news.cached_tokens)
        pieces = self._reader.feed(news.text, news.token_ids)
        if news.finish is not None:
            pieces += self._reader.finish()
        self._counts.note_reasoning(0, self._reader.reasoning_tokens)
        if self._with_logprobs:
            self._scores += chat_content(self._vocabulary, news.scores, news.token_ids)["content"]
        events: list[Event] = []
        for piece in pieces:
            events += self._items.take(piece, self._scores)
            self._scores = []
        if news.finish is not None:
            self._finish = news.finish
            self._status = _STATUS.get(news.finish.reason, "cancelled")
            events += self._items.close("completed" if self._status == "completed" else "incomplete")
        return events

    def _tell(self, events: list[Event]) -> bytes:
        told = []
        for event in events:
            told.append(sse.named(event["type"], {**event, "sequence_number": self._sequence}))
            self._sequence += 1
        return b"".join(told)

    def _usage(self) -> dict[str, Any]:
        counts = self._counts
        return {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": counts.cached_tokens,
                "cache_write_tokens": counts.prompt_tokens - counts.cached_tokens,
            },
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
            "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        }
