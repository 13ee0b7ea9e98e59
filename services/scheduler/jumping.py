"""The planner's pass for forced and guessed tokens: what a grammar leaves no choice about is a chunk, not decoded.

    step t      mask of t allows one token only: the first of the forced ones
    step t + 1  all forced tokens as one prefill row, whose sample is the first free one

Where the step waited for the result before it (leading), the forced tokens are known and stand behind the last one.
Guesses stand behind them, each with a sample under a mask of its own.
Leaves finding forced tokens to the fill jobs, guesses to drafting and decode rows to the planner.
"""

from __future__ import annotations

from services.scheduler.guide import Turn
from services.scheduler.inflight import Chunk, StepPlan
from services.scheduler.request import Request
from services.scheduler.seats import Seats
from services.scheduler.worker import Worker
from shared import ints


def choose_turns(worker: Worker) -> list[Request]:
    """Let every constrained request decode, jump or rest in the next step; returns those that jump."""
    jumps = []
    for request in worker.guided.values():
        guide = request.guide
        assert guide is not None
        if request.dispatched < request.prefill_end:
            continue
        turn = guide.turn(request)
        if turn is Turn.JUMP:
            jumps.append(request)
        resting = turn is not Turn.DECODE
        if resting is not guide.resting:
            guide.resting = resting
            worker.decoding = None
    return jumps


def add_jumps(plan: StepPlan, worker: Worker, seats: Seats, jumps: list[Request]) -> None:
    """One chunk each; every one of them gets at least a token of the step's budget."""
    seated = [request for request in jumps if request.worker is worker]
    for index, request in enumerate(seated):
        _add_jump(plan, worker, seats, request, plan.budget - (len(seated) - index - 1))


def _add_jump(plan: StepPlan, worker: Worker, seats: Seats, request: Request, budget: int) -> None:
    guide = request.guide
    assert guide is not None
    guesses, guide.guesses = guide.guesses[: plan.guesses], ()
    start, last = request.dispatched, request.known + len(guide.forced)
    end = min(last + len(guesses), start + budget)
    plan.add_pages(request.slot, seats.grow(worker, request, end))
    end = min(end, request.capacity)
    if end <= start:
        return
    guesses = guesses[: max(end - last, 0)]
    tokens = guide.tokens(request, start, end - len(guesses)) + ints.pack(guesses)
    plan.chunks.append(Chunk(request, request.slot, start, end, sample=end >= last, tokens=tokens, drafts=len(guesses)))
    plan.budget -= end - start
    plan.guesses -= len(guesses)
    plan.prefill_tokens += end - start - len(guesses)
    request.dispatched = end
    request.inflight_rows += 1
    if end >= last:
        plan.mask(request, guesses)
    if guesses:
        worker.drafting[request.slot] = len(guesses)
        worker.decoding = None
