"""Long steps are planned late, so that whoever arrives meanwhile is part of the next one; short ones at once."""

from __future__ import annotations

import pytest

from tests.local_fleet import LocalFleet, LocalWorker, tokens


def decoding_fleet(ms_per_step: float, *, requests: int = 2, depth: int = 2) -> tuple[LocalFleet, LocalWorker]:
    """Some steps are through, the last one's result has just come."""
    fleet = LocalFleet(hello={"max_slots": 8, "max_inflight_steps": depth, "max_drafts": 1})
    [worker] = fleet.workers.values()
    worker.engine.ms_per_step = ms_per_step
    for index in range(requests):
        fleet.submit(tokens(20, seed=index), 60, repetition_penalty=1.1)  # which does not guess
    fleet.advance(5)
    while worker.commands:
        fleet.step(worker)
    fleet.turn()
    return fleet, worker


@pytest.mark.parametrize(("ms_per_step", "planned"), [(0.0, 2), (8.0, 2), (100.0, 1)])
def test_only_long_steps_are_planned_late(ms_per_step: float, planned: int) -> None:
    _, worker = decoding_fleet(ms_per_step)
    assert len(worker.commands) == planned


def test_who_arrives_during_a_step_is_part_of_the_next_one() -> None:
    fleet, worker = decoding_fleet(100.0)
    late = fleet.submit(tokens(30, seed=9), 4)
    fleet.turn()
    assert len(worker.commands) == 1
    fleet.clock.advance(0.085)
    fleet.turn()
    assert [len(command.opens) for command in worker.commands] == [0, 1]
    fleet.run()
    fleet.assert_answered(late)


def test_a_result_that_comes_early_is_followed_at_once() -> None:
    fleet, worker = decoding_fleet(100.0)
    fleet.step(worker)
    assert not worker.commands
    fleet.turn()
    assert len(worker.commands) == 1


def test_steps_further_ahead_wait_for_all_before_them() -> None:
    fleet, worker = decoding_fleet(100.0, depth=3)
    for planned in (1, 2):
        assert len(worker.commands) == planned
        fleet.clock.advance(0.085)
        fleet.turn()
    assert len(worker.commands) == 3
    fleet.run()
