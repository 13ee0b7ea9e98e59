"""`best_of`: of all candidates of a prompt only the most likely ones are shown; leaves their words to another answerer.

As published for that API: ranked by log-probability per token; every candidate counts as completion tokens.
"""

from __future__ import annotations

import math

from services.tokenizer.output import LEAST_LOGPROB, Output
from services.tokenizer.render.completions import CompletionAnswerer


class BestOfAnswerer:
    """Not for streams: who is best is known at the end."""

    def __init__(self, inner: CompletionAnswerer, best_of: int, n: int) -> None:
        self._inner = inner
        self._best_of = best_of
        self._n = n

    def event(self, index: int, news: Output) -> bytes:
        return b""

    def end(self) -> bytes:
        return b""

    def whole(self, outputs: list[Output]) -> bytes:
        self._inner.count(outputs)
        chosen: list[Output] = []
        for first in range(0, len(outputs), self._best_of):
            candidates = outputs[first : first + self._best_of]
            chosen += sorted(candidates, key=mean_logprob, reverse=True)[: self._n]
        return self._inner.render(chosen)


def mean_logprob(output: Output) -> float:
    """Per token; an answer without tokens is the least likely."""
    count = len(output.scores)
    if not count:
        return -math.inf
    return sum(LEAST_LOGPROB if p is None else p for p in map(output.scores.logprob, range(count))) / count
