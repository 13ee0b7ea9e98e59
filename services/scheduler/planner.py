"""What one worker does in its next step, within its budgets of tokens, seats and pages, in named passes.

Leaves which worker a waiting request should go to to placement, and sending to dispatch.
"""

from __future__ import annotations

import structlog

from services.scheduler import recall
from services.scheduler.drafting import Drafting
from services.scheduler.groups import REFRESH_STEPS, REFRESH_STEPS_OF_GUESSES, refresh
from services.scheduler.inflight import Chunk, StepPlan
from services.scheduler.jumping import add_jumps, choose_turns
from services.scheduler.lifecycle import Lifecycle, error
from services.scheduler.metrics import Metrics
from services.scheduler.radix_tree import Lease, RadixTree
from services.scheduler.request import Request, State
from services.scheduler.seats import Seats
from services.scheduler.worker import Worker
from shared import ints
from shared.messages.step import SlotOpen

log = structlog.get_logger(__name__)

SHORTAGE_STEP = 0.05
SHORTAGE_MAX = 0.5
SHORTAGE_MIN = 0.01
SHORTAGE_DECAY = 0.995
"""Per step without a suspension: half of it is forgotten after 140 steps."""


class Planner:
    """`split_prompts` off: a prompt is only cut where no step could take it whole."""

    def __init__(
        self,
        tree: RadixTree,
        seats: Seats,
        lifecycle: Lifecycle,
        metrics: Metrics,
        drafting: Drafting,
        *,
        split_prompts: bool = True,
    ) -> None:
        self._tree = tree
        self._seats = seats
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._drafting = drafting
        self._split = split_prompts

    def plan(self, worker: Worker) -> StepPlan | None:
        """The next step, or None where there is nothing to do. Takes seats and pages as it goes."""
        plan = StepPlan(budget=worker.step_tokens)
        worker.shortage *= SHORTAGE_DECAY
        self._seats.reclaim(worker)
        drafts = self._drafting.choose(worker) if worker.max_drafts else []
        jumps = self._jumps(worker) if worker.guided else []
        self._grow(plan, worker, [*worker.collect_decoding(), *jumps, *drafts])
        self._decode(plan, worker, [*drafts, *filter(_guesses, jumps)])
        self._leave_room(plan, worker, drafts, jumps)
        self._drafting.add(plan, worker, drafts)
        add_jumps(plan, worker, self._seats, jumps)
        self._continue_prefills(plan, worker)
        self._admit(plan, worker)
        return plan if plan.decode or plan.chunks or worker.closes else None

    def _jumps(self, worker: Worker) -> list[Request]:
        if worker.max_drafts:
            self._drafting.choose_guided(worker)
        return choose_turns(worker)

    def _leave_room(self, plan: StepPlan, worker: Worker, drafts: list[Request], jumps: list[Request]) -> None:
        """Guesses get what known tokens leave of the step, and where prompts wait, half of it."""
        known = len(drafts) + sum(_jump_size(request) for request in jumps)
        plan.guesses = max(plan.budget - known, 0) // (2 if worker.prefilling or worker.candidates else 1)

    # Decode rows: every running request has its place in every step.

    def _grow(self, plan: StepPlan, worker: Worker, rows: list[Request]) -> None:
        """Give each row the page it writes first; where pages run out, the youngest lose their seats."""
        growing = [request for request in rows if request.dispatched >= request.capacity]
        if not growing:
            return
        pages = self._seats.take_pages(worker, len(growing))
        if pages is not None:
            for request, page in zip(growing, pages, strict=True):
                self._append_page(plan, request, page)
            return
        for request in sorted(growing, key=_age):
            while request.worker is worker:  # a victim has none any more
                pages = self._seats.take_pages(worker, 1)
                if pages is not None:
                    self._append_page(plan, request, pages[0])
                    break
                self._take_a_seat_away(plan, worker)

    def _append_page(self, plan: StepPlan, request: Request, page: int) -> None:
        self._seats.append_page(request, page)
        plan.add_pages(request.slot, [page])

    def _take_a_seat_away(self, plan: StepPlan, worker: Worker) -> None:
        victim = max(worker.running.values(), key=_age)
        alone = len(worker.running) == 1 and not worker.transfers
        if alone and len(victim.own) == _private_pages(victim):
            # The door admits nobody who does not fit alone, so this is a wrong count, not a full pool.
            log.error("a request does not fit alone", request_id=victim.request_id, worker=worker.worker_id)
            self._lifecycle.finish(victim, error("the KV cache cannot hold this request", 500))
            return
        for index in reversed([i for i, slot in enumerate(plan.page_slots) if slot == victim.slot]):
            del plan.page_slots[index], plan.page_ids[index]
        worker.shortage = min(worker.shortage + SHORTAGE_STEP, SHORTAGE_MAX)
        self._lifecycle.suspend(victim)

    def _decode(self, plan: StepPlan, worker: Worker, drafts: list[Request]) -> None:
        rows = worker.collect_decoding()
        plan.decode, plan.decode_slots = rows, worker.decode_slots
        plan.budget -= len(rows)
        reading = [*rows, *(request for request in drafts if request.worker is worker)] if drafts else rows
        if len(reading) > 1:
            plan.groups = refresh(
                worker, reading, worker.next_step_id, REFRESH_STEPS_OF_GUESSES if drafts else REFRESH_STEPS
            )
        ends = False
        for request in rows:
            position = request.dispatched
            ends |= position >= request.barrier and position == request.row_end - 1
            request.dispatched = position + 1
            request.inflight_rows += 1
        if ends:
            worker.decoding = None
        if worker.guided:
            for request in rows:
                if request.guide is not None:
                    plan.mask(request)

    # Prefill chunks share what the decode rows leave.

    def _continue_prefills(self, plan: StepPlan, worker: Worker) -> None:
        for request in list(worker.prefilling):
            if plan.budget <= 0:
                return
            self._add_chunk(plan, worker, request)

    def _add_chunk(self, plan: StepPlan, worker: Worker, request: Request) -> None:
        start = request.dispatched
        end = min(request.prefill_end, start + plan.budget)
        if request.prompt_scores_missing < request.prompt_length and start < request.prompt_length:
            end = min(end, request.prompt_length)  # a scored row holds no output tokens
        last = end == request.prefill_end
        samples = last and request.max_tokens > 0
        keeps = samples and start < end and recall.serves(worker, request)
        plan.chunks.append(Chunk(request, request.slot, start, end, samples, keeps_hidden=keeps))
        plan.budget -= end - start
        plan.prefill_tokens += end - start
        request.dispatched = end
        request.inflight_rows += 1
        if last:
            worker.prefilling.remove(request)
            worker.decoding = None
            if request.guide is not None and request.max_tokens > 0:
                plan.mask(request)

    # Admission: whoever placement proposes, as long as there is room.

    def _admit(self, plan: StepPlan, worker: Worker) -> None:
        for request in worker.candidates:
            if plan.budget <= 0 or worker.open_seats <= 0:
                return
            if request.state is not State.WAITING:
                continue  # an earlier step of this turn has taken it
            try:
                if not self._admit_one(plan, worker, request):
                    return
            except Exception:
                self._metrics.count("internal_errors")
                log.exception("admission failed", request_id=request.request_id, worker=worker.worker_id)
                self._lifecycle.finish(request, error("internal error"))

    def _admit_one(self, plan: StepPlan, worker: Worker, request: Request) -> bool:
        """Seat one request. False: nobody behind it may be seated in this step either."""
        if still_blocked(request, worker) or (request.guide is not None and request.guide.filling):
            return True  # a job of a lost worker may still hold its state
        match = recall.match(self._tree, worker, request)
        if self._waits_for_prefix(plan, worker, request, match.num_tokens(worker.key)):
            return True
        hit = match.hits.get(worker.key)
        wanted = -(-request.known // self._tree.page_size)
        if wanted - (hit.num_pages if hit else 0) + reserve(worker) > self._seats.available(worker):
            return False
        if not self._split and plan.prefill_tokens and request.known - match.num_tokens(worker.key) > plan.budget:
            return False
        lease = recall.acquire(self._tree, match, worker, request)
        pages = self._pages_beyond(lease, worker, wanted)
        if pages is None:
            self._tree.release(lease)
            return False
        self._open(plan, worker, request, lease, pages)
        self._add_chunk(plan, worker, request)
        return True

    def _pages_beyond(self, lease: Lease, worker: Worker, wanted: int) -> list[int] | None:
        """What `wanted` pages need beyond the leased ones; None where there is no room.

        The page to copy cannot be evicted while it is wanted: where it is the one that is missing, it is given up.
        """
        needed = wanted - lease.num_pages + reserve(worker)
        if lease.copy_tokens and needed > self._seats.available(worker):
            self._tree.forget_copy(lease)
        if needed > self._seats.available(worker):
            return None
        return self._seats.take_pages(worker, wanted - lease.num_pages)

    def _open(self, plan: StepPlan, worker: Worker, request: Request, lease: Lease, pages: list[int]) -> None:
        num_computed = recall.leased(lease)
        if lease.copy_tokens:
            plan.copies.extend((lease.copy_source, pages[0]))
            worker.pool.copied(lease.copy_source, pages[0], lease.copy_tokens)
        self._seats.take(worker, request, lease, pages, num_computed)
        plan.opens.append(
            SlotOpen(
                slot=request.slot,
                sampling=request.sampling,
                prompt_length=request.prompt_length,
                num_computed=num_computed,
                pages=ints.pack(request.pages),
                history=request.tokens(0, num_computed) if request.needs_history else b"",
                remaining=max(request.max_tokens - len(request.output), 0),
            )
        )
        plan.cached_tokens += num_computed
        worker.cached_tokens += num_computed
        self._metrics.admitted(request, num_computed)
        self._drafting.prepare(worker, request)
        self._lifecycle.start(request)

    def _waits_for_prefix(self, plan: StepPlan, worker: Worker, request: Request, hit_tokens: int) -> bool:
        """Whether another request is about to compute the next page this one needs, here."""
        if not self._tree.enabled:
            return False
        limit = request.match_limit()
        page_size = self._tree.page_size
        end = min((hit_tokens // page_size + 1) * page_size, limit)
        if hit_tokens >= end:
            return False
        needed = request.tokens(0, end)
        for other in (*worker.prefilling, *(chunk.request for chunk in plan.chunks)):
            if other.namespace == request.namespace and other.prefill_tokens.startswith(needed):
                request.blocker, request.blocked_until = other, end
                return True
        return False


def still_blocked(request: Request, worker: Worker) -> bool:
    """Whether the request it waits for is still computing the page it needs on this worker."""
    blocker = request.blocker
    if blocker is None:
        return False
    lease = blocker.lease
    prefilling = blocker.worker is worker and blocker.dispatched < blocker.prefill_end
    if prefilling and lease is not None and lease.num_tokens < request.blocked_until:
        return True
    request.blocker = None
    return False


def reserve(worker: Worker) -> int:
    """Pages to leave free when admitting, so that an admission does not take a seat away at once.

    One to grow for every seated request and for the new one; and of all the pages they may still need, a share
    that follows how often pages ran out lately. Alone a request needs no such room.
    """
    seated = len(worker.running)
    if not seated:
        return 0
    if worker.shortage < SHORTAGE_MIN:
        return seated + 1
    page_size = worker.hello.page_size
    left = sum(request.row_end - request.dispatched for request in worker.running.values())
    return seated + 1 + int(worker.shortage * left / page_size)


def _guesses(request: Request) -> bool:
    return request.guide is not None and bool(request.guide.guesses)


def _jump_size(request: Request) -> int:
    """Known and forced tokens of its chunk."""
    assert request.guide is not None
    return request.known + len(request.guide.forced) - request.dispatched


def _age(request: Request) -> tuple[int, int]:
    """Sorts the most important first; the last one loses its seat first."""
    return (-request.message.priority, request.sequence)


def _private_pages(request: Request) -> int:
    """How many pages are its own when the tree has none of them twice."""
    lease = request.lease
    assert lease is not None
    return len(request.pages) - lease.num_pages - (1 if lease.tail_page >= 0 else 0)
