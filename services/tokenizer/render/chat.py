"""The words of /v1/chat/completions; leaves sending to the exchange.

Order of a stream, per choice: the role once, reasoning, contents and calls, one finish; then usage if asked for,
then [DONE].
"""

from __future__ import annotations

import time
from typing import Any

from services.tokenizer import sse
from services.tokenizer.output import Output
from services.tokenizer.render import finish, tools
from services.tokenizer.render.logprobs import chat_content
from services.tokenizer.render.usage import Counts
from services.tokenizer.tools.reader import AnswerReader, Reading
from services.tokenizer.vocabulary import Vocabulary


class ChatAnswerer:
    """Answers of one chat request."""

    def __init__(
        self,
        *,
        response_id: str,
        model: str,
        counts: Counts,
        vocabulary: Vocabulary,
        reading: Reading,
        with_logprobs: bool,
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        self._id = response_id
        self._model = model
        self._counts = counts
        self._vocabulary = vocabulary
        self._reading = reading
        self._readers: dict[int, AnswerReader] = {}
        self._with_logprobs = with_logprobs
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._created = int(time.time())
        self._greeted: set[int] = set()
        head = {"id": response_id, "object": "chat.completion.chunk", "created": self._created, "model": model}
        self._head = b"data: " + sse.json_bytes(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    def event(self, index: int, news: Output) -> bytes:
        self._counts.note(index, news.num_output_tokens, news.cached_tokens)
        pieces = []
        if index not in self._greeted:
            self._greeted.add(index)
            pieces.append(self._chunk(index, {"role": "assistant", "content": ""}))
        if not self._reading.is_plain:
            pieces += self._read(index, news)
        elif news.text or (self._with_logprobs and news.token_ids):
            pieces.append(self._content(index, news))
        if news.finish is not None:
            pieces.append(self._chunk(index, {}, news))
        return b"".join(pieces)

    def end(self) -> bytes:
        if not self._include_usage:
            return sse.DONE
        return self._head + b'],"usage":' + sse.json_bytes(self._counts.usage()) + b"}\n\n" + sse.DONE

    def whole(self, outputs: list[Output]) -> bytes:
        for index, output in enumerate(outputs):
            self._counts.note(index, output.num_output_tokens, output.cached_tokens)
        choices = [self._choice(index, output) for index, output in enumerate(outputs)]
        return sse.json_bytes(
            {
                "id": self._id,
                "object": "chat.completion",
                "created": self._created,
                "model": self._model,
                "choices": choices,
                "usage": self._counts.usage(),
            }
        )

    def _choice(self, index: int, output: Output) -> dict[str, Any]:
        parsed, reasoning_tokens = self._reading.whole(output)
        self._counts.note_reasoning(index, reasoning_tokens)
        return {
            "index": index,
            "message": tools.message(parsed, with_reasoning=self._reading.style is not None),
            "logprobs": self._logprobs(output),
            "finish_reason": tools.finish_reason(finish.reason(output.finish), len(parsed.calls)),
            "matched_stop": finish.matched(output.finish),
            **finish.verdict(output.finish),
        }

    def _read(self, index: int, news: Output) -> list[bytes]:
        """Chunks of an answer that is more than text; scores go with the first one of their tokens."""
        reader = self._readers.setdefault(index, self._reading.open())
        found = reader.feed(news.text, news.token_ids)
        if news.finish is not None:
            found += reader.finish()
        self._counts.note_reasoning(index, reader.reasoning_tokens)
        deltas = tools.deltas(found)
        logprobs = self._logprobs(news) if news.token_ids else None
        if logprobs is not None and not deltas:
            deltas = [{"content": ""}]
        return [self._chunk(index, delta, logprobs=None if at else logprobs) for at, delta in enumerate(deltas)]

    def _content(self, index: int, news: Output) -> bytes:
        """The one chunk that is sent for every token: spliced, not built."""
        if self._with_logprobs:
            return self._chunk(index, {"content": news.text}, logprobs=self._logprobs(news))
        content = sse.json_bytes(news.text)
        middle = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null,"matched_stop":null}'
        return self._head + middle % (index, content) + self._end_of_chunk()

    def _chunk(
        self, index: int, delta: dict[str, Any], ended: Output | None = None, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        calls = self._readers[index].calls if index in self._readers else 0
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": tools.finish_reason(finish.reason(ended.finish), calls) if ended is not None else None,
            "matched_stop": finish.matched(ended.finish) if ended is not None else None,
            **finish.verdict(ended.finish if ended is not None else None),
        }
        return self._head + sse.json_bytes(choice) + self._end_of_chunk()

    def _end_of_chunk(self) -> bytes:
        if self._continuous_usage:
            return b'],"usage":' + sse.json_bytes(self._counts.usage()) + b"}\n\n"
        return self._tail

    def _logprobs(self, output: Output) -> dict[str, Any] | None:
        return chat_content(self._vocabulary, output.scores, output.token_ids) if self._with_logprobs else None
