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


class NativeItem(msgspec.Struct):
    """What the answer repeats about the prompt of one stream."""

    rid: str
    prompt_ids: array[int]
    logprobs: NativeLogprobs | None = None
    prompt_from: int = -1
    return_prompt_ids: bool = False


class NativeAnswerer:
    """Answers of one /generate request, one per item; `listed`: the caller sent a list or n > 1."""

    def __init__(self, items: Sequence[NativeItem], listed: bool, deltas: bool, started: float) -> None:
        self._items = items
        self._listed = listed
        self._deltas = deltas
        self._started = started
        self._so_far: list[Output | None] = [None] * len(items)

    def event(self, index: int, news: Output) -> bytes:
        shown = news
        if not self._deltas:
            so_far = self._so_far[index]
            if so_far is None:
                so_far = self._so_far[index] = Output(news.scores.k, news.scores.m)
            so_far.join(news)
            shown = so_far
        answer = self._answer(index, shown)
        if self._listed:
            answer["index"] = index
        return sse.event(answer)

    def end(self) -> bytes:
        return sse.DONE

    def whole(self, outputs: list[Output]) -> bytes:
        answers = [self._answer(index, output) for index, output in enumerate(outputs)]
        return sse.json_bytes(answers if self._listed else answers[0])

    def _answer(self, index: int, output: Output) -> dict[str, Any]:
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
        if item.logprobs is not None:
            meta.update(self._logprobs(item, item.logprobs, output))
        answer: dict[str, Any] = {"text": output.text, "output_ids": output.token_ids.tolist(), "meta_info": meta}
        if item.return_prompt_ids:
            answer["prompt_token_ids"] = item.prompt_ids.tolist()
        return answer

    def _logprobs(self, item: NativeItem, logprobs: NativeLogprobs, output: Output) -> dict[str, Any]:
        lists = logprobs.lists("output", output.scores, output.token_ids)
        if output.prompt_scores is not None:
            lists.update(logprobs.lists("input", output.prompt_scores, item.prompt_ids[item.prompt_from :]))
        else:
            lists["input_token_logprobs"] = []
        return lists
