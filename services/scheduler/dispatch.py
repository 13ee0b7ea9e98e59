"""From a plan to a message on its way, and what is true from then on. Leaves choosing the rows to the planner."""

from __future__ import annotations

from array import array

from services.scheduler import recall
from services.scheduler.inflight import Chunk, InflightStep, StepPlan
from services.scheduler.metrics import Metrics
from services.scheduler.seats import Seats
from services.scheduler.worker import Worker
from shared import ints
from shared.messages.step import PrefillRow, StepCommand


def build(plan: StepPlan, worker: Worker, epoch: int) -> StepCommand:
    """The command of the worker's next step; takes over the slots to close."""
    closes, worker.closes = worker.closes, array("i")
    return StepCommand(
        step_id=worker.next_step_id,
        epoch=epoch,
        decode_slots=plan.decode_slots,
        prefills=tuple(map(_prefill_row, plan.chunks)),
        opens=tuple(plan.opens),
        closes=ints.pack(closes),
        page_slots=ints.pack(plan.page_slots),
        page_ids=ints.pack(plan.page_ids),
        page_copies=ints.pack(plan.copies),
        masked_slots=ints.pack(plan.masked_slots),
        group_slots=plan.groups.slots,
        group_sizes=plan.groups.sizes,
        group_pages=plan.groups.pages,
    )


def record(plan: StepPlan, worker: Worker, seats: Seats, metrics: Metrics, now: float) -> None:
    """The command has left: its result is owed, and its prefilled pages are readable for later commands."""
    step = InflightStep(
        worker.next_step_id,
        plan.decode,
        plan.decode_slots,
        plan.chunks,
        now,
        len(plan.decode) + sum(chunk.num_samples for chunk in plan.chunks),
        plan.masked,
        ints.pack(plan.masked_slots),
    )
    if not worker.inflight:
        worker.logged_at += now - worker.head_since  # a throughput counts no idle time
        worker.head_since = now
    worker.inflight.append(step)
    worker.next_step_id += 1
    for chunk in plan.chunks:
        _store(chunk, seats, step.step_id)
        if chunk.keeps_hidden:
            recall.keep(worker, chunk.request, chunk.end, seats.tree.page_size)
    worker.computed_tokens += plan.prefill_tokens
    metrics.count("steps")
    metrics.count("prefill_steps", any(not chunk.drafts for chunk in plan.chunks))


def _store(chunk: Chunk, seats: Seats, step_id: int) -> None:
    """Whole pages; at the end of the prefill the open page too. Forced tokens wait until they are output."""
    request = chunk.request
    if chunk.tokens:
        return
    if chunk.end == request.prefill_end:
        seats.store(request, chunk.end, step_id)
        request.prefill_tokens = b""
    else:
        seats.store(request, chunk.end - chunk.end % seats.tree.page_size, step_id)


def _prefill_row(chunk: Chunk) -> PrefillRow:
    request = chunk.request
    if chunk.tokens:
        start = chunk.start if chunk.ahead is not None else -1
        return PrefillRow(chunk.slot, chunk.tokens, chunk.sample, drafts=chunk.drafts, start=start)
    token_ids = request.prefill_tokens[4 * chunk.start : 4 * chunk.end]
    if request.prompt_scores_missing >= request.prompt_length:
        return PrefillRow(chunk.slot, token_ids, chunk.sample, keep_hidden=chunk.keeps_hidden)
    next_is_prompt = chunk.end < request.prompt_length
    # A chunk's first token was scored by the logits before it, in the chunk before.
    first = max(request.prompt_scores_missing, chunk.start + 1 if chunk.start else 0)
    if first >= chunk.end + next_is_prompt:
        return PrefillRow(chunk.slot, token_ids, chunk.sample)
    return PrefillRow(
        chunk.slot,
        token_ids,
        chunk.sample,
        score_from=first,
        next_token=request.token(chunk.end) if next_is_prompt else -1,
    )
