"""Masks of the steps in flight: asked for when all earlier tokens are known, sent when they are filled.

    result t --settle--> fill job of t + 1 (other threads) --answer--> TokenMasks(t + 1), then step t + 2 is planned

A step is planned only once the masks of all older ones are on their way: what they force is part of the plan, and
no batch waits longer than it must anyway. Every masked step is answered once, even if all of its rows have ended.
Leaves matchers to the constraint room and what a token means to settle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

import structlog

from services.scheduler.constraint.masks import FilledMasks, MaskFiller, RowJob, RowOutcome
from services.scheduler.constraint.matcher import MaskRow
from services.scheduler.constraint.state import ConstraintState
from services.scheduler.fleet import Fleet
from services.scheduler.guide import Guide
from services.scheduler.inflight import InflightStep, Masked
from services.scheduler.lifecycle import Lifecycle, error
from services.scheduler.metrics import Metrics
from services.scheduler.request import Request
from services.scheduler.worker import Worker
from shared.clock import Clock
from shared.messages.step import TokenMasks
from shared.messages.stream import Finish, FinishReason

log = structlog.get_logger(__name__)

WORD_BITS = 32
STANDS_STILL = float("inf")  # the age of a step that waits for masks does not grow
Post = Callable[[Callable[[], None]], None]


class Filler(Protocol):
    """What is asked of a MaskFiller."""

    def submit(self, jobs: Sequence[RowJob]) -> Future[FilledMasks]: ...

    def prepare(self, job: RowJob) -> Future[FilledMasks]: ...

    def judge(self, state: ConstraintState, accepted: tuple[int, ...]) -> Future[RowOutcome]: ...

    def close(self) -> None: ...


class Masking:
    """`post(work)` may be called on any thread and has `work` done in a turn of the loop."""

    def __init__(
        self, fleet: Fleet, lifecycle: Lifecycle, metrics: Metrics, clock: Clock, epoch: int, post: Post
    ) -> None:
        self._fleet = fleet
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._clock = clock
        self._epoch = epoch
        self._post = post
        self.filler: Filler | None = None
        self.check: Callable[[Request, Finish], None] | None = None  # ends a request once its text was checked

    def close(self) -> None:
        if self.filler is not None:
            self.filler.close()

    def look(self, worker: Worker) -> None:
        """Have the masks of the worker's oldest step filled, where it is owed some."""
        step = worker.inflight[0] if worker.inflight else None
        if step is None or not step.masked or step.step_id <= worker.masks_asked:
            return
        worker.masks_asked = step.step_id
        worker.masking = True
        worker.head_since = STANDS_STILL
        rows = [_take_prepared(masked.request) for masked in step.masked]
        held = [None if row is not None else _hold(m.request) for m, row in zip(step.masked, rows, strict=True)]
        jobs = [_job(masked, guide) for masked, guide in zip(step.masked, held, strict=True)]
        answer = self._get_filler(worker.hello.vocab_size).submit(jobs)
        answer.add_done_callback(
            lambda done: self._post(partial(self._answered, worker, step, held, rows, done.result()))
        )

    def prepare(self, worker: Worker) -> None:
        """Have masks filled that take too long to be waited for; their rows are planned when they are there."""
        for request in worker.guided.values():
            guide = request.guide
            if guide is None or not guide.wants_preparation(request):
                continue
            guide.filling = True
            answer = self._get_filler(worker.hello.vocab_size).prepare(_job(Masked(request), guide))
            answer.add_done_callback(
                lambda done, request=request, guide=guide: self._post(  # type: ignore[misc]
                    partial(self._prepared, request, guide, done.result())
                )
            )

    def end(self, request: Request, finish: Finish) -> None:
        """Its output has its last token. What could only be enforced in part is checked before the answer goes out."""
        guide = request.guide
        if guide is None or self.check is None or not guide.best_effort:
            self._lifecycle.finish(request, finish)
            return
        guide.ending = guide.filling = True  # it neither computes nor is seated again
        self.check(request, finish)

    def judge(self, request: Request) -> None:
        """Its budget is used up: it ends by itself where its text is complete."""
        guide = request.guide
        assert guide is not None
        assert not guide.filling
        guide.ending = guide.filling = True
        vocab_size = self._fleet.model.vocab_size if self._fleet.model else WORD_BITS
        answer = self._get_filler(vocab_size).judge(guide.state, guide.take_accepted(request))
        answer.add_done_callback(lambda done: self._post(partial(self._judged, request, guide, done.result())))

    def take_lead(self, request: Request, guide: Guide, outcome: RowOutcome) -> None:
        """Its state was led: what must follow is output before any row is planned."""
        if outcome.error:
            self._break_off(request, outcome)
            return
        for token in outcome.forced:
            request.output.append(token)
            if self.stops(request, token):
                return
        guide.taken = len(request.output)
        if outcome.stopped:
            self.end(request, Finish(FinishReason.STOP, matched_token=guide.eos_id))
        elif len(request.output) >= request.max_tokens:
            self.judge(request)

    def stops(self, request: Request, token: int) -> bool:
        """End the request where its last token is a stop token."""
        ends = token in request.stops and len(request.output) > request.min_tokens
        if ends:
            self.end(request, Finish(FinishReason.STOP, matched_token=token))
        return ends

    def _break_off(self, request: Request, outcome: RowOutcome) -> None:
        log.warning("matcher failed", request_id=request.request_id, detail=outcome.error)
        self._lifecycle.finish(request, error(f"the constraint could not be followed: {outcome.error}"))

    def _get_filler(self, vocab_size: int) -> Filler:
        if self.filler is None:
            self.filler = MaskFiller(-(-vocab_size // WORD_BITS))
        return self.filler

    def _prepared(self, request: Request, guide: Guide, filled: FilledMasks) -> None:
        guide.filling = False
        if request.finish is None:
            [outcome] = filled.outcomes
            guide.prepared = filled.bitmask[0]
            self._take_outcome(request, guide, outcome, False)

    def _answered(
        self,
        worker: Worker,
        step: InflightStep,
        held: list[Guide | None],
        rows: list[MaskRow | None],
        filled: FilledMasks,
    ) -> None:
        worker.masking = False
        place = 0
        for masked, row in zip(step.masked, rows, strict=True):
            if row is not None:
                filled.bitmask[place] = row
            place += 1 + len(masked.guesses)
        for guide in held:
            if guide is not None:
                guide.filling = False
        owed = worker in self._fleet and bool(worker.inflight) and worker.inflight[0] is step
        if owed:
            worker.head_since = self._clock.now()
            masks = TokenMasks(step.step_id, self._epoch, step.masked_slots)
            owed = self._fleet.send(worker, masks, filled.data)
        self._metrics.mask_time.observe(filled.elapsed_ms / 1e3)
        for masked, guide, outcome in zip(step.masked, held, filled.outcomes, strict=True):
            if guide is not None and masked.request.finish is None:
                self._take_outcome(masked.request, guide, outcome, owed and not masked.guesses)

    def _take_outcome(self, request: Request, guide: Guide, outcome: RowOutcome, forces: bool) -> None:
        """`forces`: the row has come to where its mask is, and is followed by nothing but what that forces."""
        guide.judge_time(outcome.elapsed_ms)
        self._metrics.mask_row_time.observe(outcome.elapsed_ms / 1e3)
        if outcome.error:
            self._break_off(request, outcome)
        elif outcome.stopped:
            self.end(request, Finish(FinishReason.STOP, matched_token=guide.eos_id))
        elif forces:
            guide.keep_forced(request, outcome.forced)
        else:
            guide.useful, guide.cut, guide.ahead = outcome.useful, outcome.cut, outcome.ahead

    def _judged(self, request: Request, guide: Guide, outcome: RowOutcome) -> None:
        guide.filling = False
        if outcome.error:
            self._lifecycle.finish(request, error(f"the constraint could not be followed: {outcome.error}"))
        elif outcome.stopped or (outcome.complete and _steered(request)):
            self.end(request, Finish(FinishReason.STOP, matched_token=guide.eos_id))
        else:
            self.end(request, Finish(FinishReason.LENGTH))


def _steered(request: Request) -> bool:
    """Whether its text was led to an end: what was not, and could go on, was cut wherever it stood.

    The text beside structural tags is free, unless the request insists on its end.
    """
    constraint = request.message.constraint
    if constraint is None:
        return True
    free = constraint.kind == "structural_tag" and not constraint.refuse_small_budget
    return constraint.complete_within_budget and not free


def _hold(request: Request) -> Guide | None:
    """The request's guide, where its row is still wanted and nobody else has it."""
    guide = request.guide
    if guide is None or request.finish is not None or guide.filling:
        return None
    guide.filling = True
    return guide


def _take_prepared(request: Request) -> MaskRow | None:
    guide = request.guide
    if guide is None:
        return None
    row, guide.prepared = guide.prepared, None
    return row


def _job(masked: Masked, guide: Guide | None) -> RowJob:
    request, guesses = masked
    if guide is None:
        return RowJob(None, guesses=guesses)
    accepted = guide.take_accepted(request)
    return RowJob(guide.state, accepted, request.max_tokens - len(request.output), guesses)
