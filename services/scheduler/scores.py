"""Scores of consecutive tokens as joined columns; leaves their computation to the worker."""

from __future__ import annotations

import struct

from shared import ints
from shared.messages.request import SamplingParams
from shared.messages.stream import Scores

_NAN = struct.pack("<f", float("nan"))


def join(blocks: list[Scores]) -> Scores:
    """One block with the positions of all, in order. `blocks` is not empty."""
    if len(blocks) == 1:
        return blocks[0]
    return Scores(
        count=sum(block.count for block in blocks),
        logprobs=b"".join(block.logprobs for block in blocks),
        top_ids=b"".join(block.top_ids for block in blocks),
        top_logprobs=b"".join(block.top_logprobs for block in blocks),
        wanted=b"".join(block.wanted for block in blocks),
    )


def unknown(count: int, sampling: SamplingParams) -> Scores:
    """`count` positions without a score, in the shape this request's scores have."""
    top = count * max(sampling.logprobs, 0)
    return Scores(
        count=count,
        logprobs=_NAN * count,
        top_ids=bytes(4 * top),
        top_logprobs=_NAN * top,
        wanted=_NAN * (count * ints.count(sampling.logprob_token_ids)),
    )


def head(scores: Scores, count: int) -> Scores:
    """The first `count` positions."""
    total = scores.count
    if count >= total:
        return scores

    def cut(column: bytes) -> bytes:
        return column[: len(column) // total * count]

    return Scores(
        count=count,
        logprobs=cut(scores.logprobs),
        top_ids=cut(scores.top_ids),
        top_logprobs=cut(scores.top_logprobs),
        wanted=cut(scores.wanted),
    )


class ScoreLog:
    """What has been received for positions `start` .. `end` - 1 (output index or prompt position)."""

    __slots__ = ("_blocks", "_sampling", "end", "start")

    def __init__(self, start: int, sampling: SamplingParams) -> None:
        self.start = start
        self.end = start
        self._sampling = sampling
        self._blocks: list[Scores] = []

    def add(self, scores: Scores) -> None:
        if scores.count:
            self._blocks.append(scores)
            self.end += scores.count

    def everything(self, up_to: int) -> Scores | None:
        """Scores of 0 .. up_to - 1, unknown where this log began later; None where there is nothing."""
        if not self._blocks:
            return None
        blocks = [unknown(self.start, self._sampling), *self._blocks] if self.start else self._blocks
        joined = join(blocks)
        self._blocks, self.start = [joined], 0
        if joined.count < up_to:
            return join([joined, unknown(up_to - joined.count, self._sampling)])
        return head(joined, up_to)

    def received(self) -> Scores | None:
        """Scores of start .. end - 1, joined."""
        if not self._blocks:
            return None
        self._blocks = [join(self._blocks)]
        return self._blocks[0]

    def since(self, index: int, up_to: int) -> Scores | None:
        """Scores of output index .. up_to - 1, where each block is one token; None where there is nothing."""
        if not self._blocks or index >= self.end:
            return None
        taken: list[Scores] = []
        position = self.end
        for block in reversed(self._blocks):
            position -= block.count
            if position < index:
                break
            taken.append(block)
        taken.reverse()
        return head(join(taken), up_to - index) if taken else None
