"""The words of /v1/completions; leaves sending to the exchange."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from services.tokenizer import sse
from services.tokenizer.output import Output, ScoreColumns
from services.tokenizer.render import finish
from services.tokenizer.render.logprobs import CompletionLogprobs
from services.tokenizer.render.usage import Counts
from services.tokenizer.vocabulary import Vocabulary


class EchoedPrompt(msgspec.Struct):
    """A prompt that is part of its answer."""

    text: str
    ids: array[int]


class CompletionAnswerer:
    """Answers of one completion request; choice i belongs to prompt i // n."""

    def __init__(
        self,
        *,
        response_id: str,
        model: str,
        counts: Counts,
        vocabulary: Vocabulary,
        n: int,
        echoed: Sequence[EchoedPrompt] | None,
        with_logprobs: bool,
        include_usage: bool,
        continuous_usage: bool,
    ) -> None:
        self._head = {"id": response_id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._counts = counts
        self._vocabulary = vocabulary
        self._n = n
        self._echoed = echoed
        self._with_logprobs = with_logprobs
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._begun: set[int] = set()

    def event(self, index: int, news: Output) -> bytes:
        self._counts.note(index, news.num_output_tokens, news.cached_tokens)
        first = index not in self._begun
        if not (news.text or news.finish or (news.token_ids and self._with_logprobs) or (first and self._echoed)):
            return b""
        self._begun.add(index)
        pieces = []
        if news.text or not news.finish or (news.token_ids and self._with_logprobs) or (first and self._echoed):
            pieces.append(self._chunk(self._choice(index, news, first, ended=False)))
        if news.finish is not None:
            pieces.append(self._chunk(self._ended(index, news)))
        return b"".join(pieces)

    def end(self) -> bytes:
        if not self._include_usage:
            return sse.DONE
        return sse.event({**self._head, "choices": [], "usage": self._counts.usage()}) + sse.DONE

    def whole(self, outputs: list[Output]) -> bytes:
        self.count(outputs)
        return self.render(outputs)

    def count(self, outputs: list[Output]) -> None:
        """Take the tokens of all outputs into the usage."""
        for index, output in enumerate(outputs):
            self._counts.note(index, output.num_output_tokens, output.cached_tokens)

    def render(self, outputs: list[Output]) -> bytes:
        """The answer with these choices and what was counted."""
        choices = [self._choice(index, output, first=True, ended=True) for index, output in enumerate(outputs)]
        answer = {**self._head, "choices": choices, "usage": self._counts.usage()}
        answer["metadata"] = {"weight_version": "default"}
        return sse.json_bytes(answer)

    def _choice(self, index: int, output: Output, first: bool, ended: bool) -> dict[str, Any]:
        echo = self._echoed[index // self._n] if self._echoed and first else None
        return {
            "index": index,
            "text": (echo.text if echo else "") + output.text,
            "logprobs": self._blocks(index, output, echo) if self._with_logprobs else None,
            "finish_reason": finish.reason(output.finish) if ended else None,
            "matched_stop": finish.matched(output.finish) if ended else None,
            **finish.verdict(output.finish if ended else None),
        }

    def _ended(self, index: int, output: Output) -> dict[str, Any]:
        return {
            "index": index,
            "text": "",
            "logprobs": None,
            "finish_reason": finish.reason(output.finish),
            "matched_stop": finish.matched(output.finish),
            **finish.verdict(output.finish),
        }

    def _blocks(self, index: int, output: Output, echo: EchoedPrompt | None) -> dict[str, Any]:
        logprobs = self._logprobs.setdefault(index, CompletionLogprobs(self._vocabulary))
        block: dict[str, list[Any]] = {}
        parts: list[tuple[ScoreColumns, Sequence[int]]] = [(output.scores, output.token_ids)]
        if echo is not None and output.prompt_scores is not None:
            parts.insert(0, (output.prompt_scores, echo.ids))
        for columns, ids in parts:
            for name, values in logprobs.block(columns, ids).items():
                block.setdefault(name, []).extend(values)
        return block

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        chunk = {**self._head, "choices": [choice]}
        if self._continuous_usage:
            chunk["usage"] = self._counts.usage()
        elif self._include_usage:
            chunk["usage"] = None
        return sse.event(chunk)
