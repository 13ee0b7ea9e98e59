"""The planner's pass for guesses: what a request will probably sample is computed ahead and kept as far as it is right.

    step t      [last token, guess 1, guess 2, guess 3]  one row, a sample behind each token
    result t    [guess 1, guess 2, something else]       three tokens from one step; guess 3 is written over

A guess that fits is the very token that would have been sampled one step later, for samples are a function of seed,
position and logits, and logits do not depend on the rows beside them; so answers are the same with and without.

A request is guessed on from its last settled token. So where guesses are worth more than the pause between two steps,
the next step is planned only once the result of the one before is there. Or it is planned ahead, as if all guesses came
true: where a row's did not, its next one is a decode row. That costs what might have been guessed behind a miss: little
where many rows decode and each one more is dear.

    step t      [last token, guess 1, guess 2]                       guess 3 is expected behind them
    step t + 1  [guess 3, guess 4, guess 5]   where that is what t samples; else [what t has sampled]

Leaves guessing to foresight, under a grammar to habits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from services.scheduler.foresight import Foresight
from services.scheduler.guide import Guide
from services.scheduler.habits import CaseOdds, FormForesight, Habits
from services.scheduler.inflight import Ahead, Chunk, InflightStep, StepPlan
from services.scheduler.node import TOKEN_BYTES
from services.scheduler.odds import Odds
from services.scheduler.pace import PAUSE_MS
from services.scheduler.radix_tree import RadixTree
from services.scheduler.request import Request
from services.scheduler.seats import Seats
from services.scheduler.worker import Worker
from shared import ints
from shared.messages.step import StepResult
from shared.messages.stream import FinishReason

MOST_ROWS = 192
"""Larger steps are prefills, whose rows cost something else."""
FORESEEN = 512
"""Tokens of an answer in the tree that are taken at once."""
AHEAD_COSTS = 0.3
"""Share of a step that planning it ahead costs where rows are free,"""
AHEAD_IS_FREE = 0.125
"""and none where one row costs so much of a token: behind a miss no guess is worth that."""
PASSES = 2
"""Prices are found by turns with what they let through."""


@dataclass(frozen=True, slots=True)
class Worth:
    """Guesses of one request: how many, what they bring above their price, and the tokens to be expected of them."""

    request: Request
    count: int
    gain: float
    tokens: float


class Drafting:
    def __init__(self, tree: RadixTree, seats: Seats) -> None:
        self._tree = tree
        self._seats = seats
        # By temperature: (own text, the tree).
        self._greedy = (Odds(0.3), Odds(0.9))
        self._drawn = (Odds(0.2), Odds(0.3))
        self._habits = Habits()
        self._greedy_forms = (CaseOdds(), CaseOdds())
        self._drawn_forms = (CaseOdds(), CaseOdds())

    def prepare(self, worker: Worker, request: Request) -> None:
        """The request takes a seat."""
        if not worker.max_drafts or not _may_guess(request):
            return
        if request.guide is not None:
            self._prepare_guided(request, request.guide)
        elif request.foresight is None:
            odds = self._greedy if request.sampling.temperature <= 0 else self._drawn
            request.foresight = Foresight(request.tokens(0, request.known), *odds)

    def _prepare_guided(self, request: Request, guide: Guide) -> None:
        constraint = request.message.constraint
        if guide.foresight is None and constraint is not None:
            forms = self._habits.of(request.namespace, constraint)
            odds = self._greedy_forms if request.sampling.temperature <= 0 else self._drawn_forms
            guide.foresight = FormForesight(request.tokens(0, request.known), forms, *odds)

    def remember(self, request: Request) -> None:
        """It has ended: others under its grammar may write alike."""
        constraint, finish = request.message.constraint, request.finish
        if constraint is None or finish is None or request.guide is None or request.guide.foresight is None:
            return
        if finish.reason in (FinishReason.STOP, FinishReason.LENGTH) and request.output:
            self._habits.add(request.namespace, constraint, ints.pack(request.output))

    def forget(self) -> None:
        """What was written under grammars; requests that run keep what they hold."""
        self._habits = Habits()

    def measured(self, worker: Worker, step: InflightStep, result: StepResult) -> None:
        """A step's result is in."""
        rows = step.num_tokens
        if worker.max_drafts and 0 < rows <= MOST_ROWS and result.forward_ms > 0:
            worker.cost.observe(rows, result.forward_ms)

    def holds(self, worker: Worker) -> bool:
        """Whether the next step waits for the results of those in flight: then it carries guesses."""
        if worker.drafting and (len(worker.inflight) > 1 or not worker.guided.keys().isdisjoint(worker.drafting)):
            return True  # where the next row begins, only their result says
        if not worker.max_drafts or not worker.cost.known:
            return False
        if worker.held_step == worker.next_step_id:
            return True
        if self._should_wait(worker):
            worker.held_step = worker.next_step_id
            return True
        return False

    def _should_wait(self, worker: Worker) -> bool:
        """Whether guesses bring more than the pause, and more than those that are planned ahead."""
        rows = [request for request in worker.running.values() if request.dispatched >= request.prefill_end]
        if not rows:
            return False
        fixed, each = worker.cost.parts()
        pace = len(rows) / (fixed + each * len(rows))
        worths = self._weigh(worker, rows, pace * each, ahead=False)
        guided = sum(gain for _, _, gain in self._weigh_guided(worker, pace, each))
        if guided + sum(worth.gain for worth in worths) <= pace * PAUSE_MS:
            return False
        size = len(rows) + sum(worth.count for worth in worths)
        costs = AHEAD_COSTS * (1 - pace * each / AHEAD_IS_FREE) * (fixed + each * size)
        return guided > pace * PAUSE_MS or costs > PAUSE_MS

    def choose(self, worker: Worker) -> list[Request]:
        """Those that send guesses in the next step, and how many; they take no decode row in it."""
        if worker.drafting:
            worker.drafting.clear()
            worker.decoding = None
        if not worker.cost.known:
            return []
        rows = worker.collect_decoding()
        fixed, each = worker.cost.parts()
        tokens, size = float(len(rows)), len(rows)
        weighed: list[Worth] = []
        for _ in range(PASSES):
            # A row's price is what its time brings in such a step, guesses included.
            weighed = self._weigh(worker, rows, each * tokens / (fixed + each * size), ahead=True) if size else []
            tokens = len(rows) + sum(worth.tokens for worth in weighed)
            size = len(rows) + sum(worth.count for worth in weighed)
        chosen = [worth for worth in weighed if worth.count and worth.request.inflight_rows <= 1]
        if chosen:
            worker.drafting.update((worth.request.slot, worth.count) for worth in chosen)
            worker.decoding = None
        return [worth.request for worth in chosen]

    def choose_guided(self, worker: Worker) -> None:
        """What constrained requests guess in the next step, where nothing of them is in flight."""
        fixed, each = worker.cost.parts() if worker.cost.known else (0.0, 0.0)
        tokens, size = float(len(worker.running)), len(worker.running)
        for _ in range(PASSES if fixed else 1):
            # Nothing is worth a price that is not known.
            pace = tokens / (fixed + each * size) if fixed else float("inf")
            tokens, size = float(len(worker.running)), len(worker.running)
            for guide, guesses, gain in self._weigh_guided(worker, pace, each):
                guide.guesses = guesses
                if guesses:
                    tokens += gain + len(guesses) * pace * each
                    size += len(guesses)

    def _weigh_guided(self, worker: Worker, pace: float, each: float) -> Iterator[tuple[Guide, tuple[int, ...], float]]:
        """What each constrained request guesses where `pace` tokens come in a ms, and a row more takes `each` ms.

        So does its mask: on the machine of the worker both want the same cores.
        """
        rows = len(worker.guided)
        for request in worker.guided.values():
            guide = request.guide
            if guide is None or guide.foresight is None:
                continue
            guesses: tuple[int, ...] = ()
            gain = 0.0
            if not guide.ending and not guide.slow:
                guide.foresight.catch_up(request)
                most = min(worker.max_drafts, guide.most_guesses(request, rows))
                guesses, gain = guide.foresight.worth(most, pace * (each + guide.mean_mask_ms))
            yield guide, guesses if guide.may_guess(request) else (), gain

    def add(self, plan: StepPlan, worker: Worker, requests: list[Request]) -> None:
        """One row each, whose last known token has its place in every step; guesses share what is left for them."""
        for request in requests:
            if request.worker is worker:
                self._add_row(plan, worker, request, min(worker.drafting[request.slot], plan.guesses))

    def _add_row(self, plan: StepPlan, worker: Worker, request: Request, count: int) -> None:
        foresight, start, behind = request.foresight, request.dispatched, _behind(request)
        assert foresight is not None
        assert start == request.known - 1 + behind, f"{request.request_id} guesses from {start}, {request.known} known"
        plan.add_pages(request.slot, self._seats.grow(worker, request, start + 1 + count))
        count = min(count, request.capacity - start - 1)
        tokens = foresight.guess(behind + count)
        if behind:
            tokens = tokens[TOKEN_BYTES * (behind - 1) :]
            request.ahead = Ahead(start, int.from_bytes(tokens[:TOKEN_BYTES], "little"))
        else:
            tokens = request.tokens(start, start + 1) + tokens
        request.guessed = tokens[TOKEN_BYTES:]
        end = start + 1 + count
        plan.chunks.append(Chunk(request, request.slot, start, end, True, tokens, count, ahead=request.ahead))
        plan.budget -= 1 + count
        plan.guesses -= count
        request.dispatched = end
        request.inflight_rows += 1

    def _weigh(self, worker: Worker, rows: list[Request], price: float, *, ahead: bool) -> list[Worth]:
        """What guesses of those that may guess bring where one row more costs as much as `price` tokens.

        `ahead`: behind what is in flight of them.
        """
        found = []
        for request in rows:
            foresight = request.foresight
            if foresight is not None:
                behind = _behind(request) if ahead else 0
                if not request.guessed:
                    self._ask_tree(worker, request, foresight)
                elif behind and foresight.guess(behind - 1) != request.guessed:
                    continue  # it guesses something else by now
                most = max(min(worker.max_drafts, request.row_end - request.known - behind), 0)
                count, gain = foresight.worth(most, price, behind)
                found.append(Worth(request, count, gain, gain + count * price))
        return found

    def _ask_tree(self, worker: Worker, request: Request, foresight: Foresight) -> None:
        """Once at the beginning, then with every page for which nothing else guesses."""
        known = foresight.num_tokens
        if foresight.asked >= 0 and (foresight.guesses or known - foresight.asked < self._tree.page_size):
            return
        foresight.asked = known
        limit = min(request.total_tokens - known, FORESEEN)
        answer = self._tree.foresee(request.namespace, foresight.text(), worker.key, limit)
        if answer:
            foresight.follow(answer)


def _behind(request: Request) -> int:
    """Samples of its row in flight if all its guesses come true: then its next row begins with the last of them."""
    return 1 + len(request.guessed) // TOKEN_BYTES if request.inflight_rows else 0


def _may_guess(request: Request) -> bool:
    """Not where a token needs more than its row's logits: the tokens before it, a score."""
    return request.plain and not request.needs_history and request.max_tokens > 1
