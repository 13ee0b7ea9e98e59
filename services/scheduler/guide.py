"""What leads one constrained request: its state and how far its rows have got. Leaves jobs and messages to masking.

    known tokens                     forced     row_end
    |<------ prompt, output ------->|<------->|
    0 ............ dispatched ........ sample_at
                   (KV written by dispatched commands; the last sampling row samples the token at `sample_at`)

A decode row reads the slot's own last sample. Where more tokens are known than that one, they go as one chunk.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.scheduler.constraint.matcher import MaskRow
from services.scheduler.constraint.state import ConstraintState
from shared import ints

if TYPE_CHECKING:
    from services.scheduler.habits import FormForesight
    from services.scheduler.request import Request


SLOW_MS = 25.0
"""A mask that takes longer is filled before its row is planned: the other rows go on without it."""
FIRST_SPARED = 0.2
"""Forced runs to each sampled token, as long as nothing is known of a text."""
AHEAD_MS = 12.0
"""What the masks behind the guesses of all rows may take: they are filled while the step computes."""
MASK_MEMORY = 0.9
"""A mask that was slow is believed in for about ten more."""
REMEMBERED = 32
"""So many tokens of the text say how many there are."""


class Turn(enum.Enum):
    """What a seated request does in the next step."""

    DECODE = enum.auto()
    JUMP = enum.auto()  # several known tokens as one chunk, or guesses behind them
    REST = enum.auto()  # nothing is left to compute, or nothing can be computed yet


class Guide:
    __slots__ = (
        "ahead",
        "best_effort",
        "cut",
        "ending",
        "eos_id",
        "filling",
        "forced",
        "foresight",
        "guesses",
        "led_slowly",
        "mask_ms",
        "mean_mask_ms",
        "prepared",
        "resting",
        "sample_at",
        "slow",
        "spared",
        "state",
        "taken",
        "useful",
    )

    def __init__(self, state: ConstraintState, eos_id: int, *, best_effort: bool = False) -> None:
        self.state = state
        self.eos_id = eos_id
        self.best_effort = best_effort  # the finished text is checked
        self.taken = 0  # output tokens the state was given
        self.filling = False  # a job holds the state
        self.ending = False  # the output has its last token, only the verdict is missing
        self.forced: tuple[int, ...] = ()  # what the oldest row in flight samples, and what must follow it
        self.sample_at = -1  # position of the token that the last dispatched row samples
        self.resting = False  # takes no decode row in the next step
        self.slow = False  # its masks take too long for a batch to wait for them
        self.prepared: MaskRow | None = None  # the mask of its next row, filled before that row is planned
        self.spared = FIRST_SPARED  # rows that one token of it spares where the step behind it waits for it
        self.led_slowly = False  # taking what must follow takes too long for the loop
        self.foresight: FormForesight | None = None  # where guesses may be sent
        self.guesses: tuple[int, ...] = ()  # to be sent with the next row
        # Of the row with guesses in flight, as a RowOutcome says it:
        self.useful = 0
        self.cut = False
        self.ahead: tuple[ConstraintState, ...] = ()
        self.mask_ms = 0.1  # what its slowest mask lately took
        self.mean_mask_ms = 0.1

    def write_opening(self, request: Request, opening: Sequence[int]) -> int:
        """What every text begins with is output before the first step: it is prefilled with the prompt.

        Returns how many tokens that are.
        """
        if request.output or request.sampling.logprobs >= 0:
            return 0  # a request that goes on, or one whose tokens want a score each
        for token in opening[: request.max_tokens]:
            request.output.append(token)
            if token in request.stops and len(request.output) > request.min_tokens:
                break
        return len(request.output)

    def take_accepted(self, request: Request) -> tuple[int, ...]:
        """Output tokens the state has not had; it has them from now on."""
        accepted = tuple(request.output[self.taken :])
        self.taken = len(request.output)
        return accepted

    def keep_forced(self, request: Request, forced: tuple[int, ...]) -> None:
        """The mask of the oldest row in flight allows only the first of these."""
        if request.sampling.logprobs >= 0 or self.sample_at != request.known:
            forced = forced[:1]  # each wants a score of its own, or a later row is on its way already
        self.forced = forced

    def take_forced(self) -> tuple[int, ...]:
        """The row has come back."""
        forced, self.forced = self.forced, ()
        return forced

    def judge_time(self, elapsed_ms: float) -> None:
        """What the last mask took decides whether the batch waits for the next one, and how far it guesses."""
        self.mask_ms = max(elapsed_ms, self.mask_ms * MASK_MEMORY)
        self.mean_mask_ms += (elapsed_ms - self.mean_mask_ms) * (1 - MASK_MEMORY)
        self.slow = elapsed_ms > (SLOW_MS / 2 if self.slow else SLOW_MS)

    def wants_preparation(self, request: Request) -> bool:
        """Its next row waits for a mask that nobody fills yet."""
        waits = self.slow and self.prepared is None and not self.filling and not self.ending
        return waits and request.inflight_rows == 0 and request.dispatched >= request.prefill_end

    def may_lead(self, request: Request) -> bool:
        """What its next token forces could be taken before the row behind that is planned."""
        return (
            not self.ending
            and not self.slow
            and not self.led_slowly
            and request.sampling.logprobs < 0  # else every token wants a score of its own
            and request.dispatched >= request.prefill_end
        )

    def may_guess(self, request: Request) -> bool:
        """All that was sampled of it is known, and its next masks can be filled at once."""
        ready = not self.ending and not self.slow and not self.filling and request.inflight_rows == 0
        return ready and self.prepared is None and request.dispatched >= request.prefill_end

    def most_guesses(self, request: Request, rows: int) -> int:
        """So many masks can be filled beside a step, where `rows` want some, and so many tokens it may still get."""
        masks = int(AHEAD_MS / max(self.mask_ms, 0.01) / rows)
        return max(min(masks, request.row_end - request.known), 0)

    def go_on(self, request: Request, right: int) -> None:
        """So many guesses were right: the state behind them is its own now; of the last token nobody has told it."""
        if right:
            self.state = self.ahead[right - 1]
            self.taken = len(request.output) - 1
        self.ahead = ()

    def has_news(self, request: Request) -> bool:
        """There are tokens that nobody has told the state of, and it can be told now."""
        return self.taken < len(request.output) and not self.filling and self.may_lead(request)

    def count_spared(self, *, spared: bool) -> None:
        """A token came: whether tokens are forced behind it."""
        self.spared += (spared - self.spared) / REMEMBERED

    def lose_rows(self) -> None:
        """None of its rows comes back."""
        self.forced = self.guesses = self.ahead = ()

    def turn(self, request: Request) -> Turn:
        """Asked while its prefill is dispatched."""
        end = request.known + len(self.forced)
        if self.ending or end > request.row_end:
            return Turn.REST
        if self.slow and self.prepared is None:
            return Turn.REST
        if request.dispatched == self.sample_at and end - request.dispatched <= 1 and not self.guesses:
            return Turn.DECODE
        return Turn.JUMP

    def tokens(self, request: Request, start: int, end: int) -> bytes:
        """Known and forced tokens at positions start .. end - 1, int32 each."""
        known = request.known
        if end <= known:
            return request.tokens(start, end)
        return request.tokens(start, known) + ints.pack(self.forced[max(start - known, 0) : end - known])
