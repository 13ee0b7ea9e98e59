"""Workers that die, freeze, lie or leave; with the test's own clock."""

from __future__ import annotations

import pytest

from services.scheduler.request import State
from shared.messages.control import Heartbeat, Hello, Ping
from shared.messages.step import StepResult, WorkerDrain, WorkerFault
from shared.messages.stream import FinishReason
from tests.fake_model import generate
from tests.local_fleet import LocalFleet, tokens
from tests.local_peers import LocalWorker, worker_hello


def only_worker(fleet: LocalFleet) -> LocalWorker:
    return next(iter(fleet.workers.values()))


def some_steps(fleet: LocalFleet, count: int = 5) -> None:
    for _ in range(count):
        fleet.step(only_worker(fleet))
        fleet.turn()


def replace(fleet: LocalFleet, incarnation: int = 2) -> LocalWorker:
    fleet.workers.clear()
    return fleet.add_worker("w0", incarnation)


def started(**hello: int) -> tuple[LocalFleet, str]:
    fleet = LocalFleet(hello=hello)
    rid = fleet.submit(tokens(30), 40)
    fleet.turn()
    return fleet, rid


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_broken_connection_costs_no_token(steps: int) -> None:
    fleet, rid = started()
    some_steps(fleet, steps)
    fleet.lose_worker(only_worker(fleet))
    fleet.turn()
    assert fleet.request(rid).state is State.WAITING
    assert fleet.request(rid).inflight_rows == 0
    assert not fleet.core.board.build().ready
    fleet.add_worker("w0", 2)
    fleet.run()
    fleet.assert_answered(rid)


def test_a_step_that_cannot_be_delivered_means_the_worker_is_lost() -> None:
    fleet, rid = started()
    fleet.worker_edge.busy.add(b"w0/1")
    some_steps(fleet, 1)
    assert len(fleet.core.fleet) == 0
    replace(fleet)
    fleet.run()
    fleet.assert_answered(rid)


@pytest.mark.parametrize("kind", ["oom", "cuda", "internal"])
def test_a_fault_moves_the_requests_on(kind: str) -> None:
    fleet, rid = started()
    some_steps(fleet, 3)
    worker = only_worker(fleet)
    fleet.from_worker(worker, WorkerFault(1, 3, kind, "no memory"))
    fleet.turn()
    assert worker.reset is not None
    assert not worker.reset.fatal
    replace(fleet)
    fleet.run()
    fleet.assert_answered(rid)


def test_a_request_that_brings_down_three_workers_ends() -> None:
    fleet, rid = started()
    innocent = fleet.submit(tokens(10, seed=1), 5, deadline_s=1e6)
    for incarnation in range(2, 5):
        some_steps(fleet, 1)
        if fleet.request(innocent).live:
            some_steps(fleet, 6)
        fleet.from_worker(only_worker(fleet), WorkerFault(incarnation - 1, 0, "cuda", "device assert"))
        fleet.turn()
        replace(fleet, incarnation)
        fleet.turn()
    fleet.run()
    assert fleet.stream(rid).finish.reason is FinishReason.ERROR
    assert fleet.stream(rid).finish.status == 500
    fleet.assert_answered(innocent)


@pytest.mark.parametrize(
    "wrong",
    [
        {"step_id": 1},
        {"step_id": 77},
        {"epoch": 6},
        {"incarnation": 2},
        {"token_ids": b""},
        {"token_ids": bytes(8)},
        {"token_ids": bytes(5)},
    ],
)
def test_a_result_that_is_not_the_one_owed_resets_the_worker(wrong: dict[str, object]) -> None:
    fleet, rid = started()
    fields = {"step_id": 0, "epoch": fleet.EPOCH, "incarnation": 1, "token_ids": bytes(4), **wrong}
    fleet.from_worker(only_worker(fleet), StepResult(**fields))
    fleet.turn()
    assert only_worker(fleet).reset is not None
    assert fleet.request(rid).output.tolist() == []
    replace(fleet)
    fleet.run()
    fleet.assert_answered(rid)


def test_a_result_nobody_waits_for_resets_the_worker() -> None:
    fleet = LocalFleet()
    fleet.turn()
    fleet.from_worker(only_worker(fleet), StepResult(0, fleet.EPOCH, 1, b""))
    fleet.turn()
    assert only_worker(fleet).reset is not None


def test_silence_is_death() -> None:
    fleet, rid = started()
    fleet.clock.advance(2.0)
    fleet.turn()
    assert len(fleet.core.fleet) == 1
    fleet.clock.advance(1.1)
    fleet.from_tokenizer(Heartbeat("t", 1))
    fleet.turn()
    assert len(fleet.core.fleet) == 0
    assert fleet.request(rid).state is State.WAITING


def test_our_own_pause_is_nobodys_silence() -> None:
    fleet, rid = started()
    fleet.clock.advance(60.0)  # the scheduler itself did not run
    fleet.turn()
    assert len(fleet.core.fleet) == 1
    fleet.heartbeats()
    fleet.clock.advance(1.0)
    fleet.run()
    fleet.assert_answered(rid)


def test_a_step_that_takes_too_long_is_death_although_the_heart_beats() -> None:
    fleet = LocalFleet(step_timeout=10.0)
    fleet.submit(tokens(30), 40)
    fleet.turn()
    for _ in range(12):
        fleet.clock.advance(1.0)
        fleet.heartbeats()
        fleet.turn()
    assert only_worker(fleet).reset is not None


def test_a_heartbeat_that_tells_of_a_stuck_step_is_believed() -> None:
    fleet, _ = started()
    fleet.clock.advance(1.0)
    fleet.from_worker(only_worker(fleet), Heartbeat("w0", 1, 0, 400_000.0))
    fleet.turn()
    assert len(fleet.core.fleet) == 0


def test_a_former_life_is_answered_with_a_reset_and_changes_nothing() -> None:
    fleet, rid = started()
    zombie = only_worker(fleet)
    some_steps(fleet, 2)
    late = zombie.engine.execute(zombie.commands[0])
    heir = replace(fleet)
    fleet.turn()
    fleet.from_worker(zombie, late)
    zombie.reset = None
    fleet.turn()
    assert zombie.reset is not None
    fleet.from_worker(zombie, Heartbeat("w0", 1))
    fleet.from_worker(zombie, zombie.hello)
    fleet.turn()
    assert list(fleet.core.fleet.workers) == [heir.key.encode()]
    fleet.run()
    fleet.assert_answered(rid)


def test_a_stranger_is_told_to_say_hello_anew() -> None:
    fleet = LocalFleet(workers=0)
    stranger = LocalWorker(worker_hello("x", 5))
    fleet.worker_edge.peers[b"x/5"] = stranger.receive
    fleet.from_worker(stranger, Heartbeat("x", 5))
    fleet.turn()
    assert stranger.reset is not None
    assert not stranger.reset.fatal
    fleet.from_worker(stranger, Ping(3))
    fleet.turn()
    assert len(fleet.core.fleet) == 0


def test_a_repeated_hello_changes_nothing() -> None:
    fleet, rid = started()
    some_steps(fleet, 2)
    fleet.from_worker(only_worker(fleet), only_worker(fleet).hello)
    fleet.run()
    fleet.assert_answered(rid)
    assert fleet.stream(rid).retractions == 0


@pytest.mark.parametrize("field", ["max_slots", "max_batched_tokens", "max_context", "max_inflight_steps", "num_pages"])
def test_a_worker_that_can_hold_nothing_is_refused(field: str) -> None:
    fleet = LocalFleet(workers=0)
    worker = fleet.add_worker("w0", **{field: 0})
    fleet.turn()
    assert worker.reset is not None
    assert worker.reset.fatal


def test_the_fleets_model_outlives_its_first_worker() -> None:
    fleet = LocalFleet()
    fleet.turn()
    fleet.lose_worker(only_worker(fleet))
    fleet.turn()
    other = fleet.add_worker("w1", model_digest="another")
    fleet.turn()
    assert other.reset is not None
    assert other.reset.fatal


def test_requests_wait_for_a_worker_and_end_when_none_comes() -> None:
    fleet = LocalFleet(worker_grace=10.0)
    rid = fleet.submit(tokens(30), 40)
    fleet.turn()
    fleet.lose_worker(only_worker(fleet))
    for _ in range(9):
        fleet.clock.advance(1.0)
        fleet.heartbeats()
        fleet.turn()
    assert fleet.request(rid).state is State.WAITING
    early = fleet.submit(tokens(5), 5)
    for _ in range(3):
        fleet.clock.advance(1.0)
        fleet.heartbeats()
        fleet.turn()
    assert fleet.stream(rid).finish.reason is FinishReason.ERROR
    assert fleet.stream(rid).finish.status == 503
    late = fleet.submit(tokens(5), 5)
    fleet.turn()
    assert fleet.tokenizer.rejected[late].code == "no_worker"
    assert early not in fleet.tokenizer.rejected


def test_a_leaving_workers_requests_go_on_elsewhere() -> None:
    fleet = LocalFleet(workers=2)
    rids = [fleet.submit(tokens(30, seed=i), 40) for i in range(4)]
    fleet.turn()
    leaving = fleet.workers["w0/1"]
    assert leaving.commands
    fleet.from_worker(leaving, WorkerDrain(1, 20.0))
    fleet.run()
    fleet.assert_answered(*rids)
    assert leaving.drain is not None
    assert leaving.reset is None
    fleet.from_worker(leaving, Heartbeat("w0", 1))
    fleet.turn()
    assert leaving.reset is None, "it was let go in peace"
    assert fleet.core.metrics.counters["workers_lost"] == 0


def test_a_leaving_worker_without_an_heir_finishes_what_it_has_until_its_deadline() -> None:
    fleet = LocalFleet()
    rid = fleet.submit(tokens(30), 3000)
    fleet.turn()
    leaving = only_worker(fleet)
    fleet.from_worker(leaving, WorkerDrain(1, 5.0))
    waiting = fleet.submit(tokens(5), 5)
    for _ in range(8):
        some_steps(fleet, 1)
    assert leaving.drain is None
    assert fleet.request(waiting).state is State.WAITING
    for _ in range(6):
        fleet.clock.advance(1.0)
        fleet.heartbeats()
        fleet.turn()
    assert leaving.drain is not None
    assert fleet.request(rid).state is State.WAITING
    replace(fleet)
    fleet.abort(rid)
    fleet.run()
    fleet.assert_answered(waiting)


def test_late_words_of_a_former_life_do_not_end_the_present_one() -> None:
    fleet = LocalFleet(workers=0)
    old, new = fleet.add_worker("w0", 5), fleet.add_worker("w0", 6)
    fleet.add_detokenizer("d/2")
    tokenizer = fleet.add_tokenizer("t/2")
    fleet.turn()
    fleet.tokenizer, former = tokenizer, fleet.tokenizer
    rid = fleet.submit(tokens(20), 10)
    fleet.turn()
    fleet.from_worker(old, old.hello)
    fleet.from_worker(LocalWorker(worker_hello("w0", 4)), worker_hello("w0", 4))
    fleet.from_detokenizer(fleet.detokenizer, Hello("detokenizer", "d", 1, "ipc://d"))
    fleet.from_tokenizer(Heartbeat("t", 1), former)
    fleet.from_tokenizer(Hello("tokenizer", "t", 1), former)
    fleet.turn()
    assert list(fleet.core.fleet.workers) == [new.key.encode()]
    assert [d.key for d in fleet.core.outbox.detokenizers.values()] == ["d/2"]
    assert list(fleet.core.frontends.tokenizers) == [b"t/2"]
    fleet.workers = {new.key: new}
    fleet.run()
    assert not fleet.request(rid).live
    assert fleet.request(rid).output.tolist() == generate(tokens(20), 10)


def test_memory_that_runs_out_blames_nobody_while_steps_get_smaller() -> None:
    fleet, rid = started()
    for incarnation in range(2, 12):
        some_steps(fleet, 2)
        step = only_worker(fleet).commands[0].step_id
        fleet.from_worker(only_worker(fleet), WorkerFault(incarnation - 1, step, "oom", "no memory", "smaller"))
        fleet.turn()
        assert fleet.request(rid).faults == 0
        replace(fleet, incarnation)
        fleet.turn()
    fleet.run()
    fleet.assert_answered(rid)


def test_a_request_that_fits_into_no_step_ends() -> None:
    fleet, rid = started()
    waiting = fleet.submit(tokens(10, seed=1), 5)
    step = only_worker(fleet).commands[0].step_id
    fleet.from_worker(only_worker(fleet), WorkerFault(1, step, "oom", "no memory", "none"))
    fleet.turn()
    finish = fleet.stream(rid).finish
    assert finish is not None
    assert (finish.reason, finish.status) == (FinishReason.ERROR, 500)
    assert "memory" in finish.message
    replace(fleet)
    fleet.run()
    fleet.assert_answered(waiting)
