"""What a choice has produced: text, ids, scores, end. Two outputs of one choice join; leaves rendering to render/."""

from __future__ import annotations

import math
from array import array

from shared.messages.stream import Finish, Scores, TextChunk


class ScoreColumns:
    """Raw log-probabilities of consecutive tokens; `k` top entries and `m` wanted ones per token."""

    __slots__ = ("k", "logprobs", "m", "top_ids", "top_logprobs", "wanted")

    def __init__(self, k: int = 0, m: int = 0) -> None:
        self.k = k
        self.m = m
        self.logprobs: array[float] = array("f")
        self.top_ids: array[int] = array("i")
        self.top_logprobs: array[float] = array("f")
        self.wanted: array[float] = array("f")

    def __len__(self) -> int:
        return len(self.logprobs)

    def extend(self, scores: Scores, skip: int = 0) -> None:
        """Append a block without its first `skip` positions."""
        for column, data, width in (
            (self.logprobs, scores.logprobs, 1),
            (self.top_ids, scores.top_ids, self.k),
            (self.top_logprobs, scores.top_logprobs, self.k),
            (self.wanted, scores.wanted, self.m),
        ):
            column.frombytes(data[skip * width * 4 :])

    def join(self, other: ScoreColumns) -> None:
        self.logprobs += other.logprobs
        self.top_ids += other.top_ids
        self.top_logprobs += other.top_logprobs
        self.wanted += other.wanted

    def logprob(self, position: int) -> float | None:
        return _finite(self.logprobs[position])

    def top(self, position: int) -> list[tuple[int, float | None]]:
        """(id, logprob) of the k most likely tokens, best first; empty where the token has no score."""
        if math.isnan(self.logprobs[position]):
            return []
        span = slice(position * self.k, (position + 1) * self.k)
        return [(i, _finite(p)) for i, p in zip(self.top_ids[span], self.top_logprobs[span], strict=True)]

    def wanted_at(self, position: int) -> list[float | None]:
        return [_finite(p) for p in self.wanted[position * self.m : (position + 1) * self.m]]


LEAST_LOGPROB = -9999.0  # JSON has no infinity


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else max(value, LEAST_LOGPROB)


class Output:
    """One choice so far, or what is new since the last look at it."""

    __slots__ = (
        "cached_tokens",
        "finish",
        "num_output_tokens",
        "prompt_scores",
        "retractions",
        "scores",
        "text",
        "token_ids",
    )

    def __init__(self, k: int = 0, m: int = 0) -> None:
        self.text = ""
        self.token_ids: array[int] = array("i")
        self.scores = ScoreColumns(k, m)
        self.prompt_scores: ScoreColumns | None = None
        self.finish: Finish | None = None
        self.num_output_tokens = 0
        self.cached_tokens = 0
        self.retractions = 0

    def take_counts(self, news: TextChunk | Output) -> None:
        self.num_output_tokens = news.num_output_tokens
        self.retractions = news.retractions
        self.finish = news.finish or self.finish

    def join(self, news: Output) -> None:
        """Append what is new."""
        self.text += news.text
        self.token_ids += news.token_ids
        self.scores.join(news.scores)
        self.prompt_scores = news.prompt_scores or self.prompt_scores
        self.cached_tokens = news.cached_tokens
        self.take_counts(news)
