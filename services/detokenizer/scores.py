"""Joins and cuts blocks of scores, column by column; their meaning belongs to others."""

from __future__ import annotations

from shared.messages.stream import Scores

_ITEM = 4


def join(left: Scores | None, right: Scores | None) -> Scores | None:
    """Positions of `left`, then those of `right`."""
    if left is None or right is None:
        return right if left is None else left
    return Scores(
        left.count + right.count,
        left.logprobs + right.logprobs,
        left.top_ids + right.top_ids,
        left.top_logprobs + right.top_logprobs,
        left.wanted + right.wanted,
    )


def cut(scores: Scores | None, first: int, last: int) -> Scores | None:
    """Positions `first` up to, not including, `last`."""
    if scores is None or (first == 0 and last >= scores.count):
        return scores
    first, last = min(first, scores.count), min(last, scores.count)
    columns = (scores.logprobs, scores.top_ids, scores.top_logprobs, scores.wanted)
    return Scores(last - first, *(_slice(column, scores.count, first, last) for column in columns))


def _slice(column: bytes, count: int, first: int, last: int) -> bytes:
    width = len(column) // (count * _ITEM) * _ITEM
    return column[first * width : last * width]
