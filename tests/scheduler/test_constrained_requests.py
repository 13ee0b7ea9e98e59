"""Constrained requests in the scheduler: masks, forced tokens, ends, and every way a request can be interrupted."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from msgspec.structs import replace

from services.scheduler.request import Request, State
from shared import ints
from shared.messages.request import Constraint
from shared.messages.stream import Finish, FinishReason
from tests.local_fleet import LocalFleet, tokens
from tests.scheduler.constraint.constraint_kit import byte_tokens
from tests.scheduler.guided_kit import guided_fleet, obey, text_of

pytestmark = pytest.mark.usefixtures("pace")

EOS = (2,)
DATE = Constraint("regex", "[0-9]{4}-[0-9]{2}-[0-9]{2}")
LONG = Constraint("choice", '["the quick brown fox jumps over the lazy dog and runs away", "no"]')
PERSON = Constraint(
    "json_schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "first_name": {"enum": ["Ada", "Grace"]},
                "occupation": {"enum": ["mathematician", "rear admiral"]},
                "year_of_birth": {"type": "integer", "minimum": 1800, "maximum": 1999},
            },
            "required": ["first_name", "occupation", "year_of_birth"],
            "additionalProperties": False,
        }
    ),
)
OPEN = Constraint("regex", "[a-z ]+")
KINDS = [DATE, LONG, PERSON, OPEN]


def submit(fleet: LocalFleet, prompt: list[int], constraint: Constraint, max_tokens: int = 60, **fields: Any) -> str:
    return fleet.submit(prompt, max_tokens, constraint=constraint, stop_token_ids=EOS, **fields)


def check(fleet: LocalFleet, rid: str, constraint: Constraint) -> None:
    stream, request = fleet.stream(rid), fleet.request(rid)
    assert stream.tokens == obey(fleet.prompts[rid], constraint, request.max_tokens), text_of(stream.tokens)
    assert stream.finish is not None
    assert stream.finish.reason in (FinishReason.STOP, FinishReason.LENGTH), stream.finish


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [5, 128])
@pytest.mark.parametrize("openings", [False, True])
def test_answers_obey_whatever_the_run_ahead(depth: int, budget: int, openings: bool) -> None:
    fleet, _, _ = guided_fleet(
        openings=openings, hello={"max_inflight_steps": depth, "max_batched_tokens": budget, "max_slots": 4}
    )
    rids = {submit(fleet, tokens(20 + i, i), kind): kind for i, kind in enumerate(KINDS)}
    plain = fleet.submit(tokens(30, 9), 40)
    fleet.run()
    for rid, kind in rids.items():
        check(fleet, rid, kind)
    fleet.assert_answered(plain)
    year = next(text_of(fleet.stream(rid).tokens) for rid, kind in rids.items() if kind is DATE)
    assert re.fullmatch(DATE.source, year)


def test_forced_tokens_cost_no_step() -> None:
    decoded = {}
    for jump in (False, True):
        fleet, _, _ = guided_fleet()
        constraint = Constraint(PERSON.kind, PERSON.source, jump_forward=jump)
        rid = submit(fleet, tokens(20), constraint)
        fleet.run()
        check(fleet, rid, constraint)
        document = json.loads(text_of(fleet.stream(rid).tokens))
        assert list(document) == ["first_name", "occupation", "year_of_birth"]
        decoded[jump] = fleet.core.metrics.counters["steps"], fleet.core.metrics.counters["forced_tokens"]
    assert decoded[False][1] == 0
    assert decoded[True][1] > 5
    assert decoded[True][0] < decoded[False][0] - 5


def test_what_every_text_begins_with_is_prefilled_with_the_prompt() -> None:
    steps = {}
    for openings in (False, True):
        fleet, _, _ = guided_fleet(openings=openings, hello={"max_inflight_steps": 1})
        [worker] = fleet.workers.values()
        rid = submit(fleet, tokens(20), PERSON)
        fleet.turn()
        [prefill] = worker.commands[0].prefills
        assert (ints.count(prefill.token_ids) > 20) is openings
        fleet.run()
        check(fleet, rid, PERSON)
        steps[openings] = fleet.core.metrics.counters["steps"]
    assert steps[True] == steps[False] - 1


@pytest.mark.parametrize("budget", [0, 1, 2, 60])
def test_an_opening_obeys_the_budget_and_stop_tokens(budget: int) -> None:
    fleet, _, _ = guided_fleet()
    rid = submit(fleet, tokens(20), PERSON, budget)
    answer = obey(tokens(20), PERSON, 60)
    stopped = fleet.submit(tokens(21), budget, constraint=PERSON, stop_token_ids=answer[1:2])
    fleet.run()
    check(fleet, rid, PERSON)
    assert fleet.stream(stopped).tokens == answer[: min(budget, 2)]
    assert fleet.stream(stopped).finish.reason is (FinishReason.STOP if budget >= 2 else FinishReason.LENGTH)


def test_a_complete_text_stops_without_an_end_token() -> None:
    fleet, _, _ = guided_fleet()
    rid = submit(fleet, tokens(20), DATE)
    fleet.run()
    finish = fleet.stream(rid).finish
    assert finish.reason is FinishReason.STOP
    assert finish.matched_token == 2
    assert 2 not in fleet.stream(rid).tokens


def test_no_step_is_planned_while_masks_are_filled_and_the_clock_stands_still() -> None:
    fleet, filler, _ = guided_fleet(step_timeout=10.0)
    [worker] = fleet.workers.values()
    filler.held = True
    rid = submit(fleet, tokens(20), PERSON)
    plain = fleet.submit(tokens(21, 1), 30)
    fleet.turn()
    assert len(worker.commands) == 1
    for _ in range(40):
        fleet.clock.advance(1.0)
        fleet.heartbeats()
        fleet.turn()
    assert len(worker.commands) == 1
    assert worker.reset is None
    filler.release()
    fleet.run()
    check(fleet, rid, PERSON)
    fleet.assert_answered(plain)


def test_an_abort_while_the_masks_are_on_their_way_still_owes_them() -> None:
    fleet, filler, _ = guided_fleet()
    [worker] = fleet.workers.values()
    filler.held = True
    rid = submit(fleet, tokens(20), PERSON)
    other = submit(fleet, tokens(25, 3), DATE)
    fleet.turn()
    masked = worker.commands[0]
    assert ints.count(masked.masked_slots) == 2
    fleet.abort(rid)
    fleet.turn()
    assert fleet.request(rid).state is State.FINISHED
    filler.release()
    fleet.turn()
    assert masked.step_id in worker.masks
    fleet.run()
    check(fleet, other, DATE)
    assert fleet.stream(rid).finish.reason is FinishReason.ABORT


def test_an_abort_of_the_only_masked_row_is_answered_with_all_ones() -> None:
    fleet, _, _ = guided_fleet()
    [worker] = fleet.workers.values()
    rid = submit(fleet, tokens(20), PERSON)
    fleet.turn()
    fleet.turn()
    fleet.abort(rid)
    fleet.turn()
    owed = worker.commands[1]
    assert owed.masked_slots
    fleet.step(worker)
    fleet.turn()
    fleet.turn()
    assert set(worker.masks[owed.step_id][1]) == {0xFF}
    fleet.run()
    assert worker.engine.open_slots == 0


def test_compiling_holds_no_place_and_can_be_aborted() -> None:
    fleet, _, compiling = guided_fleet()
    compiling.held = True
    first, second = submit(fleet, tokens(20), DATE), submit(fleet, tokens(22, 2), DATE)
    fleet.turn()
    assert fleet.request(first).state is State.COMPILING
    assert first not in fleet.detokenizer.streams
    plain = fleet.submit(tokens(21, 1), 5)
    fleet.run()
    fleet.assert_answered(plain)
    fleet.abort(first)
    fleet.turn()
    assert compiling.cancelled == [first]
    compiling.release()
    fleet.run()
    check(fleet, second, DATE)
    assert fleet.stream(first).finish.reason is FinishReason.ABORT


def test_a_failing_matcher_ends_its_own_request_only() -> None:
    fleet, _, _ = guided_fleet()
    [worker] = fleet.workers.values()
    bad, good = submit(fleet, tokens(20), OPEN), submit(fleet, tokens(21, 1), DATE)
    fleet.turn()
    fleet.step(worker)
    assert not fleet.request(bad).guide.state.advance([byte_tokens()[ord("9")]])
    fleet.run()
    assert fleet.stream(bad).finish.reason is FinishReason.ERROR
    check(fleet, good, DATE)


def test_suspended_and_resumed_in_a_small_pool() -> None:
    fleet, _, _ = guided_fleet(hello={"num_pages": 14})
    rids = {submit(fleet, tokens(20 + i, i), kind, 80): kind for i, kind in enumerate(KINDS * 3)}
    fleet.run()
    for rid, kind in rids.items():
        check(fleet, rid, kind)
    assert sum(fleet.stream(rid).retractions for rid in rids) > 0


@pytest.mark.parametrize("held", [False, True])
def test_a_lost_worker_loses_no_state(held: bool) -> None:
    fleet, filler, _ = guided_fleet()
    rids = {submit(fleet, tokens(20 + i, i), kind): kind for i, kind in enumerate(KINDS)}
    [lost] = fleet.workers.values()
    fleet.turn()
    for _ in range(4):
        fleet.step(lost)
        fleet.turn()
    filler.held = held
    if held:
        fleet.step(lost)
        fleet.turn()
    fleet.lose_worker(lost)
    fleet.turn()
    fleet.add_worker("heir")
    fleet.turn()
    filler.release()
    fleet.run()
    for rid, kind in rids.items():
        check(fleet, rid, kind)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("kind", [DATE, PERSON])
def test_the_grammar_begins_after_the_thinking_part(kind: Constraint, lost: bool) -> None:
    """Whatever happens to the worker in between; a token that ends answers does not end thoughts."""
    prompt = tokens(20)
    free = obey(prompt, OPEN, 12, stops=(), thinking_end=1 << 30)  # nothing ends these thoughts
    fleet, _, _ = guided_fleet()
    rid = submit(fleet, prompt, kind, thinking_end_id=free[7])
    [worker] = fleet.workers.values()
    if lost:
        fleet.turn()
        for _ in range(11):
            fleet.step(worker)
            fleet.turn()
        fleet.lose_worker(worker)
        fleet.add_worker("heir")
    fleet.run()
    stream = fleet.stream(rid)
    assert stream.tokens == obey(prompt, kind, 60, thinking_end=free[7])
    assert stream.tokens[:8] == free[:8]
    assert stream.finish.reason is FinishReason.STOP
    answer = text_of(stream.tokens[8:])
    assert re.fullmatch(DATE.source, answer) if kind is DATE else json.loads(answer)


def test_choices_of_one_prompt_go_their_own_ways() -> None:
    fleet, _, _ = guided_fleet()
    prompt = tokens(40)
    rids = [submit(fleet, prompt, PERSON, group_id="g", choice_index=i, seed=i) for i in range(2)]
    fleet.run()
    for rid in rids:
        check(fleet, rid, PERSON)
    assert fleet.request(rids[0]).guide is not fleet.request(rids[1]).guide


def test_a_request_taken_over_from_another_scheduler_replays_its_tokens() -> None:
    prompt = tokens(20)
    answer = obey(prompt, PERSON, 60)
    for count in (1, len(answer) // 2, len(answer)):
        fleet, _, _ = guided_fleet()
        rid = submit(fleet, prompt, PERSON, output_ids=ints.pack(answer[:count]))
        fleet.run()
        assert fleet.stream(rid).tokens == answer
        assert fleet.stream(rid).finish.reason is FinishReason.STOP


def test_scored_tokens_have_a_score_each() -> None:
    fleet, _, _ = guided_fleet()
    rid = submit(fleet, tokens(20), PERSON, logprobs=0)
    fleet.run()
    check(fleet, rid, PERSON)
    stream = fleet.stream(rid)
    assert len(stream.logprobs) == len(stream.tokens)


def test_a_slow_grammar_holds_up_nobody_else() -> None:
    """Its masks are filled before its rows are planned: steps go on without it."""
    fleet, filler, _ = guided_fleet()
    [worker] = fleet.workers.values()
    filler.elapsed_ms = lambda: 80.0
    rid = submit(fleet, tokens(20), OPEN, 12)
    plain = fleet.submit(tokens(30, 9), 40)
    fleet.turn()
    fleet.step(worker)
    assert fleet.request(rid).guide.slow
    filler.held = True
    fleet.turn()
    before = len(fleet.request(plain).output)
    for _ in range(12):
        fleet.step(worker)
        fleet.turn()
    assert len(fleet.request(plain).output) > before + 8
    assert fleet.request(rid).inflight_rows == 0
    filler.release()
    fleet.run()
    check(fleet, rid, OPEN)
    fleet.assert_answered(plain)


@pytest.mark.parametrize("budget", [4, 60])
def test_a_text_that_is_checked_ends_with_the_verdict(budget: int) -> None:
    fleet, _, _ = guided_fleet()
    checked: list[tuple[Request, Finish]] = []
    fleet.core.masking.check = lambda request, finish: checked.append((request, finish))
    constraint = Constraint(DATE.kind, DATE.source, best_effort=True)
    rid = submit(fleet, tokens(20), constraint, budget)
    plain = fleet.submit(tokens(21, 1), 40)
    fleet.run()
    [(request, finish)] = checked
    assert request.live
    assert fleet.stream(rid).finish is None
    fleet.assert_answered(plain)
    fleet.core.lifecycle.finish(request, replace(finish, verdict="violates", violation="because"))
    fleet.run()
    check(fleet, rid, constraint)
    assert fleet.stream(rid).finish.verdict == "violates"
    assert fleet.stream(rid).finish.reason is (FinishReason.LENGTH if budget == 4 else FinishReason.STOP)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(12))
def test_random_lives(seed: int) -> None:
    """Small pools, odd budgets, run-ahead, aborts, held masks and dying workers; every answer is the one it must be."""
    rng = random.Random(seed)
    hello = {
        "num_pages": rng.choice([16, 24, 64]),
        "max_batched_tokens": rng.choice([8, 17, 128]),
        "max_slots": 8,
        "max_inflight_steps": rng.choice([1, 2, 2, 3]),
    }
    fleet, filler, _ = guided_fleet(workers=2, hello=hello, openings=rng.random() < 0.5)
    filler.elapsed_ms = lambda: rng.choice([0.1, 0.1, 80.0])
    rids: dict[str, Constraint | None] = {}
    aborted: set[str] = set()
    lost = 0
    for turn in range(120):
        if rng.random() < 0.2 and len(rids) < 16:
            prompt, budget = tokens(rng.randint(1, 60), rng.randint(0, 5)), rng.randint(1, 60)
            kind = rng.choice([*KINDS, None])
            rid = submit(fleet, prompt, kind, budget) if kind else fleet.submit(prompt, budget)
            rids[rid] = kind
        if rng.random() < 0.03 and rids:
            aborted.add(victim := rng.choice(list(rids)))
            fleet.abort(victim)
        if rng.random() < 0.1:
            filler.held = True
        elif rng.random() < 0.3:
            filler.release()
        if rng.random() < 0.02 and lost < 2:  # after three it would be taken for the cause
            lost += 1
            fleet.lose_worker(rng.choice(list(fleet.workers.values())))
            fleet.add_worker(f"new{turn}")
        fleet.turn()
        for worker in list(fleet.workers.values()):
            command = worker.commands[0] if worker.commands else None
            if command is not None and (not command.masked_slots or command.step_id in worker.masks):
                fleet.step(worker)
    filler.release()
    fleet.run()
    for rid, kind in rids.items():
        if rid in aborted:
            continue
        if kind is None:
            fleet.assert_answered(rid)
        else:
            check(fleet, rid, kind)
