"""Steps that wait for a result and carry what it forces; and where the next step leaves before the result is there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from services.scheduler.constraint.masks import lead_row
from shared import ints
from shared.messages.request import Constraint
from shared.messages.step import StepCommand
from shared.messages.stream import FinishReason
from tests.local_fleet import LocalFleet, tokens
from tests.local_peers import LocalWorker
from tests.scheduler.constraint.constraint_kit import byte_tokens
from tests.scheduler.guided_kit import WORDS, guided_fleet, new_state, obey
from tests.scheduler.test_constrained_requests import DATE, LONG, OPEN, PERSON, check, submit

LONG_STEPS = 20.0
MANY = 40


def fleet_of(ms_per_token: float, **settings: Any) -> tuple[LocalFleet, LocalWorker]:
    fleet, _, _ = guided_fleet(**settings)
    [worker] = fleet.workers.values()
    worker.engine.ms_per_token = ms_per_token
    fleet.turn()
    [known] = fleet.core.fleet
    known.pace.observe(10 * ms_per_token, 10)  # as of steps before
    return fleet, worker


def turns(fleet: LocalFleet) -> None:
    """Until the masks that were asked for are there, and the step that waited for them is planned."""
    fleet.turn()
    fleet.turn()
    fleet.clock.advance(1.0)  # late enough for what is planned late
    fleet.heartbeats()
    fleet.turn()


def choices(prompt: list[int], constraint: Constraint) -> int:
    """How many tokens of the answer are not forced."""
    state = new_state(constraint)
    answer = obey(prompt, constraint, 60)
    count = 0
    while answer and not state.is_stopped:
        forced = state.take_forced(60)
        del answer[: len(forced)]
        if answer:
            assert state.advance((answer.pop(0),))
            count += 1
    return count


def rows_of(commands: list[StepCommand]) -> int:
    return sum(len(ints.unpack(command.decode_slots)) + len(command.prefills) for command in commands)


@pytest.mark.parametrize("kind", [DATE, LONG, PERSON])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_row_for_each_token_that_is_not_forced_and_no_other(kind: Constraint, depth: int) -> None:
    fleet, worker = fleet_of(LONG_STEPS, hello={"max_inflight_steps": depth})
    rid = submit(fleet, tokens(20), kind)
    fleet.run()
    check(fleet, rid, kind)
    assert rows_of(worker.engine.steps) == choices(tokens(20), kind)


def test_the_row_behind_a_choice_carries_the_choice_and_what_it_forces() -> None:
    fleet, worker = fleet_of(LONG_STEPS)
    rid = submit(fleet, tokens(20), PERSON)
    fleet.run()
    chunks = [row for command in worker.engine.steps[1:] for row in command.prefills]
    output = fleet.stream(rid).tokens
    place = ints.count(worker.engine.steps[0].prefills[0].token_ids) - 20
    for row in chunks:
        known = ints.unpack(row.token_ids).tolist()
        place = next(at for at in range(place, len(output)) if output[at : at + len(known)] == known) + len(known)
        assert len(known) > 1
    assert chunks


def test_where_steps_are_short_the_next_one_leaves_before_the_result() -> None:
    rows = {}
    for ms_per_token in (0.01, LONG_STEPS):
        fleet, worker = fleet_of(ms_per_token)
        rid = submit(fleet, tokens(20), PERSON)
        fleet.run()
        check(fleet, rid, PERSON)
        rows[ms_per_token] = rows_of(worker.engine.steps)
    assert rows[LONG_STEPS] < rows[0.01]


@pytest.mark.parametrize(("plain", "ahead"), [(0, 1), (1, 1), (24, 2)])
def test_few_constrained_rows_do_not_hold_up_many_others(plain: int, ahead: int) -> None:
    """A pause costs all rows a share of a step."""
    fleet, worker = fleet_of(
        LONG_STEPS / (1 + plain), hello={"max_slots": 32, "max_batched_tokens": 4096, "num_pages": 512}
    )
    rid = submit(fleet, tokens(20), DATE)
    others = [fleet.submit(tokens(20, i + 1), 40) for i in range(plain)]
    for _ in range(5):
        turns(fleet)
        fleet.step(worker)
    turns(fleet)
    assert fleet.request(rid).live
    assert len(worker.commands) == ahead
    fleet.run()
    check(fleet, rid, DATE)
    fleet.assert_answered(*others)


def test_a_text_in_which_nothing_is_forced_runs_ahead_again() -> None:
    fleet, worker = fleet_of(LONG_STEPS)
    rid = submit(fleet, tokens(20), OPEN, 3 * MANY)
    ahead = []
    fleet.turn()
    for _ in range(2 * MANY):
        fleet.step(worker)
        turns(fleet)
        ahead.append(len(worker.commands))
    assert set(ahead[:4]) == {1}
    assert fleet.request(rid).guide.spared < 0.05
    worker.engine.ms_per_token = 1.0  # a pause of 1.5 ms is not worth a few spared rows any more
    for _ in range(MANY // 2):
        fleet.step(worker)
        turns(fleet)
    assert len(worker.commands) == 2
    fleet.run()
    check(fleet, rid, OPEN)


def test_forced_tokens_are_sent_with_the_one_that_forces_them() -> None:
    fleet, worker = fleet_of(LONG_STEPS)
    rid = submit(fleet, tokens(20), LONG)
    fleet.turn()
    fleet.step(worker)
    fleet.turn()
    sent = fleet.stream(rid).tokens
    assert sent == obey(tokens(20), LONG, 60)[: len(sent)]
    assert len(sent) > 2


@pytest.mark.parametrize("budget", range(1, 26))
def test_the_budget_ends_anywhere(budget: int) -> None:
    fleet, _ = fleet_of(LONG_STEPS)
    rid = submit(fleet, tokens(20), PERSON, budget)
    fleet.run()
    check(fleet, rid, PERSON)
    assert fleet.stream(rid).finish.reason is FinishReason.LENGTH


def test_any_token_may_be_a_stop_token() -> None:
    answer = obey(tokens(20), PERSON, 60)
    for stop in set(answer):
        fleet, _ = fleet_of(LONG_STEPS)
        rid = fleet.submit(tokens(20), 60, constraint=PERSON, stop_token_ids=(stop,))
        fleet.run()
        assert fleet.stream(rid).tokens == answer[: answer.index(stop) + 1]
        assert fleet.stream(rid).finish.matched_token == stop


def test_a_worker_lost_between_a_forced_run_and_its_chunk() -> None:
    fleet, worker = fleet_of(LONG_STEPS)
    rid = submit(fleet, tokens(20), PERSON)
    fleet.turn()
    while not (worker.commands and worker.commands[0].step_id and worker.commands[0].prefills):
        fleet.step(worker)
        turns(fleet)
    fleet.lose_worker(worker)
    fleet.add_worker("heir")
    fleet.run()
    check(fleet, rid, PERSON)


def test_a_state_that_is_led_slowly_is_left_to_the_threads() -> None:
    fleet, worker = fleet_of(LONG_STEPS)
    rid = submit(fleet, tokens(20), PERSON)
    fleet.turn()
    fleet.request(rid).guide.led_slowly = True
    fleet.step(worker)
    turns(fleet)
    assert len(worker.commands) == 2
    fleet.run()
    check(fleet, rid, PERSON)


def test_leading_is_filling_in_two_parts() -> None:
    """What must follow is the same, and so is the mask behind it."""
    answer = obey(tokens(20), PERSON, 60)
    state, other = new_state(PERSON), new_state(PERSON)
    rows = np.empty((2, WORDS), np.int32)
    given = 0
    while given < len(answer):
        led = lead_row(state, tuple(answer[given : given + 1]), 60)
        assert other.advance(answer[given : given + 1])
        given += 1
        assert led.forced == other.fill(rows[0], 60)
        if led.stopped:
            break
        assert other.advance(led.forced)
        given += len(led.forced)
        assert state.fill(rows[0], 60) == other.fill(rows[1], 60) == ()
        assert np.array_equal(rows[0], rows[1])
    assert state.is_stopped


def test_a_token_that_is_not_allowed_breaks_its_own_state_off() -> None:
    outcome = lead_row(new_state(DATE), (byte_tokens()[ord("x")],), 60)
    assert outcome.error
    assert outcome.forced == ()
    assert not outcome.stopped
