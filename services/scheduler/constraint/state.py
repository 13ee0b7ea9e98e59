"""What one request keeps of its constraint: a matcher, and whether it has begun, jumps ahead or watches the budget.

It never leaves the scheduler and survives every suspend and resume. Only one thread may use it at a time: the
loop while no fill job holds it, the fill job's thread until that job has answered.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.scheduler.constraint.budget import BudgetGuard
from services.scheduler.constraint.matcher import MaskRow, Matcher

ALL_ALLOWED = -1  # int32 with every bit set


class ConstraintState:
    """With `thinking_end` >= 0 everything but `ends` is allowed until that token; the grammar begins after it."""

    __slots__ = ("_ends", "_forced", "_guard", "_jump_forward", "_matcher", "_thinking_end")

    def __init__(
        self,
        matcher: Matcher,
        guard: BudgetGuard | None = None,
        *,
        jump_forward: bool = True,
        thinking_end: int = -1,
        ends: Sequence[int] = (),
    ) -> None:
        self._matcher = matcher
        self._guard = guard
        self._jump_forward = jump_forward
        self._thinking_end = thinking_end
        self._ends = tuple(token for token in ends if token != thinking_end)
        self._forced: tuple[int, ...] = ()  # what must follow, as the last mask found it

    @property
    def begun(self) -> bool:
        """The grammar rules from the next token on."""
        return self._thinking_end < 0

    @property
    def error(self) -> str:
        return self._matcher.error

    @property
    def is_complete(self) -> bool:
        """The text satisfies its grammar as it is."""
        return self.begun and self._matcher.is_complete

    @property
    def is_stopped(self) -> bool:
        """The text is complete and nothing may follow: the request can finish without another step."""
        return self.begun and self._matcher.is_stopped

    def advance(self, ids: Sequence[int]) -> bool:
        """Take tokens of the output, in order. False: the grammar forbids one of them; see `error`."""
        if not self.begun:
            if self._thinking_end not in ids:
                return True
            ids = ids[ids.index(self._thinking_end) + 1 :]
            self._thinking_end = -1
        if not ids:
            return True
        forced = bool(self._forced) and tuple(ids) == self._forced[: len(ids)]
        self._forced = self._forced[len(ids) :] if forced else ()
        if self._guard is not None:
            self._guard.follow(ids, forced=forced)
        return self._matcher.advance(ids)

    def fill(self, row: MaskRow, budget: int) -> tuple[int, ...]:
        """Overwrite `row` with the tokens allowed next; the forced tokens, the first of them alone in the mask.

        `budget` counts the tokens the output may still get. Forced tokens are cut to it.
        """
        if not self.begun:
            self._fill_thinking(row, budget)
            return ()
        forced = self._matcher.forced_tokens()[: max(budget, 1)] if self._jump_forward else []
        self._forced = tuple(forced)
        if forced:
            only(row, forced[0])
            return self._forced
        if self._matcher.fill_mask(row) and self._guard is not None:
            self._guard.restrict(self._matcher, budget, row)
        return ()

    def take_forced(self, budget: int) -> tuple[int, ...]:
        """Advance by the tokens that must follow, `budget` of them at most; which those are."""
        if not self.begun or not self._jump_forward:
            return ()
        forced = self._forced = tuple(self._matcher.forced_tokens()[: max(budget, 0)])
        return forced if self.advance(forced) else ()

    def fork(self) -> ConstraintState:
        """An independent copy, for another choice of the same prompt."""
        guard = self._guard.fork() if self._guard is not None else None
        matcher = self._matcher.fork()
        copy = ConstraintState(
            matcher, guard, jump_forward=self._jump_forward, thinking_end=self._thinking_end, ends=self._ends
        )
        copy._forced = self._forced
        return copy

    def _fill_thinking(self, row: MaskRow, budget: int) -> None:
        row[:] = ALL_ALLOWED
        bits = row.view("uint32")
        for token in self._ends:  # who only thinks has not answered
            bits[token >> 5] &= ~(1 << (token & 31)) & 0xFFFFFFFF
        if self._guard is not None and budget <= self._guard.needed + 1:
            only(row, self._thinking_end)


def only(row: MaskRow, token: int) -> None:
    """Allow nothing but `token`."""
    row[:] = 0
    row.view("uint32")[token >> 5] = 1 << (token & 31)


def allows(row: MaskRow, token: int) -> bool:
    """Whether `token` is allowed."""
    return bool(int(row.view("uint32")[token >> 5]) >> (token & 31) & 1)
