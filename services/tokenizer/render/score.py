"""The words of /v1/score; leaves computing log-probabilities to the workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from services.tokenizer import sse
from services.tokenizer.output import LEAST_LOGPROB, Output
from services.tokenizer.render.usage import Counts


class ScoreAnswerer:
    """One row of scores per item: how likely each label token is as the next one."""

    def __init__(self, model: str, counts: Counts, apply_softmax: bool) -> None:
        self._model = model
        self._counts = counts
        self._apply_softmax = apply_softmax

    def event(self, index: int, news: Output) -> bytes:
        return b""

    def end(self) -> bytes:
        return b""

    def whole(self, outputs: list[Output]) -> bytes:
        for index, output in enumerate(outputs):
            self._counts.note(index, 0, output.cached_tokens)
        answer: dict[str, Any] = {
            "scores": [self._row(output) for output in outputs],
            "model": self._model,
            "usage": self._counts.usage(),
            "object": "scoring",
        }
        return sse.json_bytes(answer)

    def _row(self, output: Output) -> list[float]:
        wanted = output.scores.wanted_at(0) if len(output.scores) else []
        logprobs = [LEAST_LOGPROB if value is None else value for value in wanted]
        return _softmax(logprobs) if self._apply_softmax else [math.exp(value) for value in logprobs]


def _softmax(logprobs: Sequence[float]) -> list[float]:
    """Shares among the labels alone."""
    most = max(logprobs, default=0.0)
    weights = [math.exp(value - most) for value in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]
