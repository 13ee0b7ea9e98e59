"""Constrained requests without threads or processes: masks are filled when asked for, or when the test lets them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache
from typing import Any

import numpy as np
from msgspec.structs import replace

from services.scheduler.constraint.budget import BudgetGuard, Ending
from services.scheduler.constraint.completion import Search
from services.scheduler.constraint.masks import FilledMasks, RowJob, RowOutcome, fill_rows, judge_row
from services.scheduler.constraint.state import ConstraintState
from services.scheduler.guide import Guide
from services.scheduler.request import Request
from shared.messages.request import Constraint
from tests.fake_model import EMPTY, VOCAB, chain, sampled_under
from tests.local_fleet import LocalFleet
from tests.scheduler.constraint.constraint_kit import build, token_order, vocabulary

WORDS = -(-VOCAB // 32)  # as wide as the worker says, wider than the vocabulary of the grammars


class InlineFiller:
    """Fills on the spot; while `held` is set, answers wait for `release`."""

    def __init__(self) -> None:
        self.held = False
        self.asked = 0
        self.elapsed_ms: Callable[[], float] = lambda: 0.1
        self._waiting: list[Callable[[], None]] = []

    def submit(self, jobs: Sequence[RowJob]) -> Future[FilledMasks]:
        self.asked += 1

        def fill() -> FilledMasks:
            rows = [np.empty((1 + len(job.guesses), WORDS), np.int32) for job in jobs]
            filled = [fill_rows(job, own) for job, own in zip(jobs, rows, strict=True)]
            bitmask = np.concatenate(rows)
            outcomes = tuple(replace(outcome, elapsed_ms=self.elapsed_ms()) for outcome in filled)
            return FilledMasks(bitmask, outcomes, 0.1)

        return self._answer(fill)

    def prepare(self, job: RowJob) -> Future[FilledMasks]:
        return self.submit([job])

    def judge(self, state: ConstraintState, accepted: tuple[int, ...]) -> Future[RowOutcome]:
        return self._answer(lambda: judge_row(state, accepted))

    def release(self) -> None:
        self.held = False
        waiting, self._waiting = self._waiting, []
        for work in waiting:
            work()

    def close(self) -> None:
        pass

    def _answer(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if self.held:
            self._waiting.append(lambda: future.set_result(work()))
        else:
            future.set_result(work())
        return future


class InstantCompiling:
    """Compiles in no time, on the loop's thread; `hold` leaves requests COMPILING until `release`."""

    def __init__(self, fleet: LocalFleet, openings: bool) -> None:
        self.held = False
        self.openings = openings
        self.cancelled: list[str] = []
        self._fleet = fleet
        self._waiting: list[Request] = []

    def take(self, request: Request) -> None:
        lifecycle = self._fleet.core.lifecycle
        lifecycle.compile(request, lambda: self.cancelled.append(request.request_id))
        self._waiting.append(request)
        if not self.held:
            self.release()

    def counters(self) -> dict[str, float]:
        return {}

    def release(self) -> None:
        self.held = False
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            if request.live:
                constraint = request.message.constraint
                assert constraint is not None
                state = new_state(constraint, request.message.thinking_end_id)
                request.guide = Guide(state, vocabulary().eos_ids[0], best_effort=constraint.best_effort)
                if self.openings and constraint.jump_forward and state.begun:
                    request.guide.write_opening(request, state.fork().fill(np.empty(WORDS, np.int32), 1 << 20))
                self._fleet.core.lifecycle.admit(request)
                if request.output:
                    self._fleet.core.resume(request)


def new_state(constraint: Constraint, thinking_end: int = -1) -> ConstraintState:
    matcher = build(constraint.kind, constraint.source, any_whitespace=constraint.any_whitespace)
    guard = BudgetGuard(ending(constraint), token_order()) if constraint.complete_within_budget else None
    return ConstraintState(
        matcher, guard, jump_forward=constraint.jump_forward, thinking_end=thinking_end, ends=vocabulary().eos_ids
    )


@cache
def ending(constraint: Constraint) -> Ending:
    """Where a text of the grammar can end soonest."""
    shortest = Search(token_order(), 2000).shortest(build(constraint.kind, constraint.source), 64)
    assert shortest is not None
    return Ending(tuple(shortest), 8, plain_is_harmless=constraint.kind == "json_schema")


def guided_fleet(*, openings: bool = True, **settings: Any) -> tuple[LocalFleet, InlineFiller, InstantCompiling]:
    fleet = LocalFleet(model_path="given", **settings)
    filler, compiling = InlineFiller(), InstantCompiling(fleet, openings)
    fleet.core.masking.filler = filler
    fleet.core.compiling = compiling  # type: ignore[assignment]
    return fleet, filler, compiling


def obey(
    prompt: list[int],
    constraint: Constraint,
    max_tokens: int,
    stops: tuple[int, ...] = (2,),
    thinking_end: int = -1,
) -> list[int]:
    """What a request must answer, however it was scheduled: the fake's choice under each mask."""
    state = new_state(constraint, thinking_end)
    row = np.empty(WORDS, np.int32)
    hashed = EMPTY
    for token in prompt:
        hashed = chain(hashed, token)
    output: list[int] = []
    while len(output) < max_tokens and not state.is_stopped:
        forced = state.fill(row, max_tokens - len(output))
        for token in forced or (sampled_under(hashed, row.tobytes()),):
            output.append(token)
            hashed = chain(hashed, token)
            if token in stops:
                return output
            assert state.advance([token]), state.error
    return output


def text_of(tokens: Sequence[int]) -> str:
    return vocabulary().decode(list(tokens)).decode("utf-8", "replace")
