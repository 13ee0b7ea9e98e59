"""The words of /generate; leaves sending to the exchange.

Streams carry the text so far, as programs of this API expect, or only what is new with --stream-output.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from services.tokenizer import sse
from services.tokenizer.output import Output
from services.tokenizer.render import finish
from services.tokenizer.render.logprobs import NativeLogprobs

Lists = dict[str, list[Any]]


class NativeItem(msgspec.Struct):
    """What the answer repeats about the prompt of one stream."""

    rid: str
    prompt_ids: array[int]
    logprobs: NativeLogprobs | None = None
    prompt_from: int = -1
    return_prompt_ids: bool = False


class _SoFar:
    """One stream up to now, each row rendered once."""

    def __init__(self) -> None:
        self.output = Output()
        self.lists: Lists = {}

    def join(self, news: Output, lists: Lists) -> None:
        self.output.join(news)
        for name, rows in lists.items():
            self.lists.setdefault(name, []).extend(rows)


class NativeAnswerer:
    """Answers of one /generate request, one per item; `listed`: the caller sent a list or n > 1."""

    def __init__(self, items: Sequence[NativeItem], listed: bool, deltas: bool, started: float) -> None:
        self._items = items
        self._listed = listed
        self._deltas = deltas
        self._started = started
        self._so_far: dict[int, _SoFar] = {}

    def event(self, index: int, news: Output) -> bytes:
        lists = self._logprobs(self._items[index], news)
        if self._deltas:
            answer = self._answer(index, news, lists)
        else:
            so_far = self._so_far.setdefault(index, _SoFar())
            so_far.join(news, lists)
            answer = self._answer(index, so_far.output, so_far.lists)
        if self._listed:
            answer["index"] = index
        return sse.event(answer)

    def end(self) -> bytes:
        return sse.DONE

    def whole(self, outputs: list[Output]) -> bytes:
        answers = [
            self._answer(index, output, self._logprobs(self._items[index], output))
            for index, output in enumerate(outputs)
        ]
        return sse.json_bytes(answers if self._listed else answers[0])

    def answer(self, index: int, output: Output) -> dict[str, Any]:
        """The whole answer of one stream, for those who put it into something larger."""
        return self._answer(index, output, self._logprobs(self._items[index], output))

    def _answer(self, index: int, output: Output, logprobs: Lists) -> dict[str, Any]:
        item = self._items[index]
        meta: dict[str, Any] = {
            "id": item.rid,
            "finish_reason": finish.native(output),
            "prompt_tokens": len(item.prompt_ids),
            "weight_version": "default",
            "total_retractions": output.retractions,
            "completion_tokens": output.num_output_tokens,
            "cached_tokens": output.cached_tokens,
        }
        if output.finish is not None:
            meta["e2e_latency"] = time.monotonic() - self._started
        meta.update(logprobs)
        meta.update(finish.verdict(output.finish))
        answer: dict[str, Any] = {"text": output.text, "output_ids": output.token_ids.tolist(), "meta_info": meta}
        if item.return_prompt_ids:
            answer["prompt_token_ids"] = item.prompt_ids.tolist()
        return answer

    def _logprobs(self, item: NativeItem, output: Output) -> Lists:
        if item.logprobs is None:
            return {}
        lists = item.logprobs.lists("output", output.scores, output.token_ids)
        if output.prompt_scores is not None:
            lists.update(item.logprobs.lists("input", output.prompt_scores, item.prompt_ids[item.prompt_from :]))
        else:
            lists["input_token_logprobs"] = []
        return lists
