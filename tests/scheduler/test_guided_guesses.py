"""Guesses under constraints: the answers are those without, whatever is guessed, and never a token behind the end."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.constraint import masks
from services.scheduler.guide import SLOW_MS
from services.scheduler.request import Request
from services.scheduler.worker import Worker
from shared import ints
from shared.messages.request import Constraint
from shared.messages.stream import FinishReason
from tests.fake_model import VOCAB
from tests.local_fleet import LocalFleet, tokens
from tests.scheduler.constraint.constraint_kit import vocabulary
from tests.scheduler.guesses import let_guess
from tests.scheduler.guided_kit import InlineFiller, ending, guided_fleet, obey, text_of
from tests.scheduler.test_constrained_requests import DATE, KINDS, LONG, OPEN, PERSON, check, submit

DRAFTS = 7
WORDS_OF_ANY_LENGTH = Constraint(
    "json_schema",
    '{"type":"object","properties":{"words":{"type":"array","items":{"type":"string"}}},"required":["words"]}',
)


class GuidedOracle:
    """In place of a FormForesight: guesses right ones, then one that is wrong, allowed or not, then anything."""

    def __init__(self, request: Request, seed: int, most: int) -> None:
        prompt = ints.unpack(request.message.prompt_ids).tolist()
        assert request.message.constraint is not None
        stops, thinking = request.message.sampling.stop_token_ids, request.message.thinking_end_id
        self._answer = obey(prompt, request.message.constraint, request.max_tokens, tuple(stops), thinking)
        self._draw, self._most, self._known = random.Random(seed), most, 0

    def catch_up(self, request: Request) -> None:
        self._known = len(request.output)
        assert request.output.tolist() == self._answer[: self._known]

    def worth(self, most: int, price: float) -> tuple[tuple[int, ...], float]:
        count = self._draw.randint(0, min(most, self._most))
        right = self._answer[self._known : self._known + self._draw.randint(0, count)]
        wrong = [self._draw.choice([self._draw.randrange(VOCAB), 2]) for _ in range(count - len(right))]
        return (*right, *wrong), float(count)


def guessing_fleet(most: int = DRAFTS, seed: int = 0, **options: Any) -> tuple[LocalFleet, InlineFiller]:
    hello = {"max_drafts": DRAFTS, "max_slots": 8, **options.pop("hello", {})}
    fleet, filler, _ = guided_fleet(hello=hello, **options)
    for worker in fleet.workers.values():
        worker.engine.ms_per_step = 20.0
    drafting: Any = fleet.core.drafting
    prepare, draw = drafting.prepare, random.Random(seed)

    def with_oracle(worker: Worker, request: Request) -> None:
        fresh = request.guide is not None and request.guide.foresight is None
        prepare(worker, request)
        if fresh and request.guide is not None and request.guide.foresight is not None:
            request.guide.foresight = GuidedOracle(request, draw.getrandbits(32), most)  # type: ignore[assignment]

    if most:
        drafting.prepare = with_oracle
    return fleet, filler


def guesses_of(fleet: LocalFleet) -> tuple[int, int]:
    engines = [worker.engine for worker in fleet.workers.values()]
    return sum(e.guesses for e in engines), sum(e.right_guesses for e in engines)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [5, 128])
def test_answers_obey_whatever_is_guessed(depth: int, budget: int) -> None:
    fleet, _ = guessing_fleet(seed=depth, hello={"max_inflight_steps": depth, "max_batched_tokens": budget})
    let_guess(fleet)
    rids = {submit(fleet, tokens(20 + i, i), kind): kind for i, kind in enumerate(KINDS)}
    plain = [fleet.submit(tokens(30 + i, 9 + i), 40) for i in range(2)]
    fleet.run()
    for rid, kind in rids.items():
        check(fleet, rid, kind)
    fleet.assert_answered(*plain)
    sent, right = guesses_of(fleet)
    assert 0 < right < sent
    counters = fleet.core.metrics.counters
    assert (counters["draft_tokens"], counters["accepted_draft_tokens"]) == (sent, right)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(KINDS),
    budget=st.integers(1, 40),
    openings=st.booleans(),
    jump=st.booleans(),
)
def test_any_guesses_any_budget(seed: int, kind: Constraint, budget: int, openings: bool, jump: bool) -> None:
    fleet, _ = guessing_fleet(seed=seed, openings=openings)
    constraint = Constraint(kind.kind, kind.source, jump_forward=jump)
    rids = [submit(fleet, tokens(12 + i, seed % 1000 + i), constraint, budget) for i in range(3)]
    fleet.run()
    for rid in rids:
        check(fleet, rid, constraint)


@pytest.mark.parametrize("kind", KINDS)
def test_any_token_may_be_a_stop_token(kind: Constraint) -> None:
    answer = obey(tokens(20), kind, 60)
    for stop in set(answer):
        fleet, _ = guessing_fleet(seed=stop)
        rid = fleet.submit(tokens(20), 60, constraint=kind, stop_token_ids=(stop,))
        fleet.run()
        assert fleet.stream(rid).tokens == answer[: answer.index(stop) + 1]
        assert fleet.stream(rid).finish.matched_token == stop


def test_a_text_that_a_guess_completes_ends_there() -> None:
    """Nothing may follow it, though the worker samples behind the guess."""
    ended = 0
    for seed in range(20):
        fleet, _ = guessing_fleet(seed=seed)
        rid = submit(fleet, tokens(20), DATE)
        fleet.turn()
        while fleet.stream(rid).finish is None:
            before = guesses_of(fleet)[1]
            fleet.turn()
            for worker in list(fleet.workers.values()):
                if worker.commands:
                    fleet.step(worker)
            fleet.turn()
            ended += fleet.stream(rid).finish is not None and guesses_of(fleet)[1] > before
        fleet.run()
        check(fleet, rid, DATE)
        assert fleet.stream(rid).finish.reason is FinishReason.STOP
        assert fleet.stream(rid).finish.matched_token == 2
    assert ended


def test_thinking_is_guessed_too() -> None:
    end = vocabulary().encode("x")[0]
    fleet, _ = guessing_fleet()
    rid = submit(fleet, tokens(20), PERSON, 60, thinking_end_id=end)
    fleet.run()
    request = fleet.request(rid)
    assert fleet.stream(rid).tokens == obey(tokens(20), PERSON, request.max_tokens, thinking_end=end)
    assert guesses_of(fleet)[1]


def test_a_lost_worker_takes_no_guess_with_it() -> None:
    for steps in range(1, 9):
        fleet, _ = guessing_fleet(seed=steps, workers=2)
        rids = {submit(fleet, tokens(20 + i, i), kind): kind for i, kind in enumerate(KINDS)}
        fleet.advance(steps)
        fleet.lose_worker(next(iter(fleet.workers.values())))
        fleet.run()
        for rid, kind in rids.items():
            check(fleet, rid, kind)


def test_a_pool_that_is_too_small_cuts_guesses_and_not_answers() -> None:
    fleet, _ = guessing_fleet(hello={"num_pages": 14, "page_size": 4, "max_drafts": 15}, page_size=4)
    rids = {submit(fleet, tokens(5 + i, i), kind, 30): kind for i, kind in enumerate([OPEN, PERSON, OPEN, LONG])}
    fleet.run()
    for rid, kind in rids.items():
        check(fleet, rid, kind)
    assert fleet.core.metrics.counters["retractions"]
    assert guesses_of(fleet)[1]


def test_masks_that_are_late_hold_up_their_step_alone() -> None:
    fleet, filler = guessing_fleet()
    rid = submit(fleet, tokens(20), OPEN)
    for _ in range(12):
        filler.held = True
        for _ in range(3):
            fleet.turn()
        filler.release()
        fleet.turn()
        for worker in fleet.workers.values():
            if worker.commands:
                fleet.step(worker)
    fleet.run()
    check(fleet, rid, OPEN)
    assert guesses_of(fleet)[1]


def test_a_request_that_is_aborted_leaves_its_masks_owed() -> None:
    fleet, filler = guessing_fleet(seed=4)
    rid, other = submit(fleet, tokens(20), OPEN), submit(fleet, tokens(21), OPEN)
    [worker] = fleet.workers.values()
    while not any(row.drafts for command in worker.commands for row in command.prefills):
        if worker.commands:
            fleet.step(worker)
        fleet.turn()
    filler.held = True
    fleet.abort(rid)
    fleet.turn()
    filler.release()
    fleet.run()
    check(fleet, other, OPEN)


@pytest.mark.parametrize(("mask_ms", "most"), [(0.1, DRAFTS), (2.9, 4), (9.0, 1)])
def test_masks_that_take_long_are_filled_for_fewer_guesses(mask_ms: float, most: int) -> None:
    fleet, filler = guessing_fleet()
    filler.elapsed_ms = lambda: mask_ms
    rid = submit(fleet, tokens(20), OPEN)
    [worker] = fleet.workers.values()
    sent = []
    fleet.turn()
    while fleet.stream(rid).finish is None:
        if worker.commands:
            sent += [row.drafts for row in worker.commands[0].prefills]
            fleet.step(worker)
        fleet.turn()
    check(fleet, rid, OPEN)
    assert max(sent[3:]) == most


@pytest.mark.parametrize("kind", [PERSON, WORDS_OF_ANY_LENGTH])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), more=st.integers(0, 25))
def test_texts_end_within_their_budget_whatever_is_guessed(kind: Constraint, seed: int, more: int) -> None:
    """The way to the end is kept as if tokens had come one by one."""
    constraint = Constraint(kind.kind, kind.source, complete_within_budget=True)
    assert ending(constraint).shortest is not None
    budget = len(ending(constraint).shortest or ()) + more
    fleet, _ = guessing_fleet(seed=seed)
    rid = submit(fleet, tokens(12, seed % 1000), constraint, budget)
    fleet.run()
    check(fleet, rid, constraint)
    assert fleet.stream(rid).finish.reason is FinishReason.STOP
    json.loads(text_of(fleet.stream(rid).tokens))


def test_where_masks_behind_guesses_fail_the_request_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What breaks a copy of its state may never be sampled; its seat is taken anew where the worker went too far."""
    draw, real = random.Random(1), masks._state_after

    def sometimes(*arguments: Any) -> Any:
        return real(*arguments) if draw.random() < 0.6 else None

    monkeypatch.setattr(masks, "_state_after", sometimes)
    retractions = 0
    for seed in range(6):
        fleet, _ = guessing_fleet(seed=seed)
        rids = {submit(fleet, tokens(20 + i, i), kind): kind for i, kind in enumerate(KINDS)}
        fleet.run()
        for rid, kind in rids.items():
            check(fleet, rid, kind)
        retractions += fleet.core.metrics.counters["retractions"]
    assert retractions


def test_guesses_of_a_row_that_lost_its_seat_are_forgotten() -> None:
    fleet, _ = guessing_fleet()
    rid = submit(fleet, tokens(20), OPEN)
    [worker] = fleet.workers.values()
    for _ in range(4):
        fleet.turn()
        fleet.step(worker)
    fleet.turn()
    request = fleet.request(rid)
    assert request.guide is not None
    request.guide.guesses = (1, 2, 3)  # chosen, and then pages ran out
    fleet.core.lifecycle.suspend(request)
    assert request.guide.guesses == ()
    fleet.run()
    check(fleet, rid, OPEN)


def test_guesses_leave_room_for_rows_and_prompts() -> None:
    """In a step of 16 tokens: every row has its place, and a prompt that waits gets half of what is left."""
    fleet, _ = guessing_fleet(hello={"max_batched_tokens": 16})
    let_guess(fleet)
    free = [fleet.submit(tokens(4 + i, 50 + i), 40) for i in range(3)]
    guided = {submit(fleet, tokens(4 + i, 60 + i), OPEN): OPEN for i in range(3)}
    fleet.advance(12)
    [worker] = fleet.workers.values()
    late = fleet.submit(tokens(60, 99), 5)
    fleet.run()
    fleet.assert_answered(*free, late)
    for rid, kind in guided.items():
        check(fleet, rid, kind)
    rows = [len(ints.unpack(step.decode_slots)) + len(step.prefills) for step in worker.engine.steps[8:12]]
    assert min(rows) >= 5, "nobody is left out of a step for others' guesses"


def test_guided_rows_with_guesses_read_shared_pages_together() -> None:
    prompt = tokens(20 * 16, 3)
    fleet, _ = guessing_fleet(hello={"max_batched_tokens": 1024, "num_pages": 256})
    first = submit(fleet, prompt, OPEN, 2)
    fleet.run()
    rids = [submit(fleet, [*prompt, *tokens(5, i)], OPEN, 40) for i in range(4)]
    fleet.run()
    for rid in (first, *rids):
        check(fleet, rid, OPEN)
    [worker] = fleet.workers.values()
    grouped = [step for step in worker.engine.steps if step.group_sizes and any(row.drafts for row in step.prefills)]
    assert grouped
    assert worker.engine.shared_reads


def test_slow_masks_are_not_guessed_behind() -> None:
    fleet, filler = guessing_fleet()
    filler.elapsed_ms = lambda: 2 * SLOW_MS
    rid = submit(fleet, tokens(20), OPEN)
    fleet.run()
    check(fleet, rid, OPEN)
    assert guesses_of(fleet)[0] <= DRAFTS, "before the first one was filled"


@pytest.mark.parametrize("fields", [{"logprobs": 1}, {"repetition_penalty": 1.2}])
def test_who_may_not_guess_does_not(fields: dict[str, float]) -> None:
    fleet, _ = guessing_fleet(most=0)
    for _ in range(3):
        submit(fleet, tokens(20), PERSON)
        fleet.run()
    before = guesses_of(fleet)[0]
    submit(fleet, tokens(20), PERSON, **fields)
    fleet.run()
    assert guesses_of(fleet)[0] == before


def test_texts_of_one_grammar_teach_each_other() -> None:
    """The same form with other words, in fewer steps than the first time."""
    steps = []
    fleet, _ = guessing_fleet(most=0)
    for index in range(5):
        before = fleet.core.metrics.counters["steps"]
        rid = submit(fleet, tokens(20 + index, index), PERSON)
        fleet.run()
        check(fleet, rid, PERSON)
        steps.append(fleet.core.metrics.counters["steps"] - before)
    assert steps[-1] < steps[0]
    assert guesses_of(fleet)[1]


def test_guesses_can_be_switched_off() -> None:
    fleet, _ = guessing_fleet(most=0, speculative_algorithm="none")
    for index in range(3):
        submit(fleet, tokens(20 + index, index), PERSON)
        fleet.run()
    assert guesses_of(fleet) == (0, 0)
