"""How large a step may be after memory ran out in one: smaller at first, until the request to blame is alone.

Pure arithmetic; leaves freeing memory to `memory` and what happens to requests to the scheduler.

    8192 tokens, 256 seats   step of 40 decode rows and 3000 prompt tokens fails
    1500 tokens, 256 seats   ... of 40 rows and 64 prompt tokens fails
    1500 tokens,  20 seats   ... 10 .. 5 .. 2 .. 1: a step of one request fails, is tried once more, fails again
    8192 tokens, 256 seats   that request does not fit; it ends, the others never were the cause
"""

from __future__ import annotations

from dataclasses import dataclass

LEAST_TOKENS = 64
"""Prefill chunks are cut no smaller: what a step needs beyond its rows hardly shrinks any more."""
EPISODE_STEPS = 4096
"""So many good steps after a fault, the size found is the right one; a later fault has another cause."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """What a hello offers."""

    tokens: int
    slots: int


class StepSizes:
    """The size that is offered now. Every failure at least halves what failed, so that there are few of them."""

    def __init__(self, offered: StepSize) -> None:
        self.now = offered
        self._before = offered  # to come back to, once the culprit is found
        self._steps = 0
        self._tried_alone = False

    def after_fault(self, tokens: int, rows: int, steps: int) -> bool:
        """Memory ran out in a step of so many tokens and rows, after `steps` good steps since the start.

        Whether the next size differs, or is worth another try: then no request is to blame.
        """
        if steps - self._steps > EPISODE_STEPS:
            self._before, self._tried_alone = self.now, False
        self._steps = steps
        if tokens >= 2 * rows and tokens > LEAST_TOKENS:
            self.now = StepSize(max(LEAST_TOKENS, min(self.now.tokens, tokens) // 2), self.now.slots)
        elif rows > 1:
            self.now = StepSize(self.now.tokens, max(1, min(self.now.slots, rows) // 2))
        elif not self._tried_alone:
            self._tried_alone = True  # memory that was freed meanwhile may be enough
        else:
            self.now, self._tried_alone = self._before, False
            return False
        return True
