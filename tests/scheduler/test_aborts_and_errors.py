"""Aborts in every state, failing rows, deadlines, and exceptions that must stay within their request."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.request import State
from shared.messages.step import RowScores, StepResult
from shared.messages.stream import FinishReason, Scores
from tests.fake_model import generate
from tests.local_fleet import LocalFleet, tokens
from tests.local_peers import LocalWorker


def only_worker(fleet: LocalFleet) -> LocalWorker:
    return next(iter(fleet.workers.values()))


def assert_empty(fleet: LocalFleet) -> None:
    """Nothing runs, and every page is free or cached."""
    fleet.run()
    assert fleet.core.lifecycle.num_live == 0
    for worker in fleet.core.fleet:
        assert not worker.running
        assert worker.pool.free + fleet.core.tree.evictable_pages(worker.key) == worker.pool.num_pages


def assert_aborted(fleet: LocalFleet, rid: str) -> None:
    finish = fleet.stream(rid).finish
    assert finish is not None
    assert finish.reason is FinishReason.ABORT


def test_abort_while_waiting() -> None:
    fleet = LocalFleet(workers=0)
    rid = fleet.submit(tokens(10), 5)
    fleet.turn()
    assert fleet.request(rid).state is State.WAITING
    fleet.abort(rid)
    fleet.turn()
    assert_aborted(fleet, rid)
    assert len(fleet.core.waiting) == 0


def test_abort_in_the_turn_of_arrival() -> None:
    fleet = LocalFleet()
    rid = fleet.submit(tokens(10), 5)
    fleet.abort(rid)
    fleet.turn()
    assert_aborted(fleet, rid)
    assert_empty(fleet)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("steps", range(8))
def test_abort_while_prefilling_or_decoding_with_steps_in_flight(depth: int, steps: int) -> None:
    fleet = LocalFleet(hello={"max_inflight_steps": depth, "max_batched_tokens": 32})
    neighbour = fleet.submit(tokens(30, seed=1), 20)
    rid = fleet.submit(tokens(100), 50)
    fleet.turn()
    for _ in range(steps):
        fleet.step(only_worker(fleet))
        fleet.turn()
    fleet.abort(rid, rid, "unknown", "")
    fleet.turn()
    assert_aborted(fleet, rid)
    fleet.abort(rid)
    assert_empty(fleet)
    fleet.assert_answered(neighbour)
    assert fleet.stream(rid).tokens == generate(tokens(100), 50)[: len(fleet.stream(rid).tokens)]


def test_what_an_aborted_request_has_computed_is_found_by_the_next() -> None:
    fleet = LocalFleet(hello={"max_inflight_steps": 1, "max_batched_tokens": 32})
    rid = fleet.submit(tokens(100), 50)
    fleet.turn()
    fleet.step(only_worker(fleet))
    fleet.turn()  # two chunks are dispatched: 64 tokens
    fleet.abort(rid)
    fleet.run()
    again = fleet.submit(tokens(100), 5)
    fleet.run()
    assert fleet.stream(again).cached_tokens == 64
    fleet.assert_answered(again)


def test_abort_while_suspended_with_rows_in_flight() -> None:
    fleet = LocalFleet(workers=2, hello={"max_inflight_steps": 3})
    rid = fleet.submit(tokens(30), 50)
    fleet.turn()
    request = fleet.request(rid)
    first = request.worker
    assert first is not None
    fleet.core.drain_worker(first, 100.0)
    fleet.turn()
    assert request.state is State.SUSPENDED
    assert request.inflight_rows > 0
    fleet.abort(rid)
    fleet.turn()
    assert_aborted(fleet, rid)
    assert_empty(fleet)


def test_results_of_a_suspended_request_are_kept_and_it_waits_until_all_are_in() -> None:
    fleet = LocalFleet(workers=2, hello={"max_inflight_steps": 3})
    rid = fleet.submit(tokens(30), 50)
    fleet.turn()
    request = fleet.request(rid)
    first = request.worker
    assert first is not None
    worker = fleet.workers[first.key]
    fleet.core.drain_worker(first, 100.0)
    fleet.turn()
    states = []
    while worker.commands:
        fleet.step(worker)
        fleet.turn()
        states.append((request.state, len(request.output)))
    assert (State.SUSPENDED, 1) in states
    assert len(request.output) >= 3
    fleet.run()
    fleet.assert_answered(rid)
    assert fleet.stream(rid).retractions == 1


def test_a_stop_token_that_arrives_after_the_suspension_ends_the_request() -> None:
    fleet = LocalFleet(workers=2, hello={"max_inflight_steps": 2})
    stop = generate(tokens(30), 2)[1]
    rid = fleet.submit(tokens(30), 50, stop_token_ids=(stop,))
    fleet.turn()
    first = fleet.request(rid).worker
    assert first is not None
    fleet.core.drain_worker(first, 100.0)
    fleet.run()
    fleet.assert_answered(rid)
    assert fleet.stream(rid).finish.reason is FinishReason.STOP


def test_a_failed_row_ends_its_request_and_the_batch_goes_on() -> None:
    fleet = LocalFleet()
    bad, good = fleet.submit(tokens(20), 30), fleet.submit(tokens(20, seed=1), 30)
    only_worker(fleet).engine.fail_tokens.add(generate(tokens(20), 30)[11])
    fleet.run()
    finish = fleet.stream(bad).finish
    assert finish.reason is FinishReason.ERROR
    assert "finite" in finish.message
    assert fleet.stream(bad).tokens == generate(tokens(20), 11)
    fleet.assert_answered(good)
    assert_empty(fleet)


def test_a_row_skipped_without_reason_ends_its_request() -> None:
    fleet = LocalFleet(hello={"max_inflight_steps": 1})
    rid = fleet.submit(tokens(20), 30)
    fleet.turn()
    command = only_worker(fleet).commands.pop()
    fleet.from_worker(only_worker(fleet), StepResult(command.step_id, fleet.EPOCH, 1, b"\xff\xff\xff\xff"))
    fleet.turn()
    assert fleet.stream(rid).finish.reason is FinishReason.ERROR


@pytest.mark.parametrize(("seat", "status"), [(True, 408), (False, 504)])
def test_a_deadline_ends_a_request_wherever_it_is(seat: bool, status: int) -> None:
    fleet = LocalFleet(workers=int(seat))
    rid = fleet.submit(tokens(10), 500, deadline_s=2.0)
    fleet.turn()
    fleet.clock.advance(1.9)
    fleet.heartbeats()
    fleet.turn()
    assert fleet.request(rid).live
    fleet.clock.advance(0.2)
    fleet.turn()
    assert_aborted(fleet, rid)
    assert fleet.stream(rid).finish.status == status
    assert_empty(fleet)


def test_an_exception_while_admitting_ends_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = LocalFleet()
    match = fleet.core.tree.match

    def fails_for_one(namespace: bytes, prompt: bytes) -> Any:
        if namespace == b"poison":
            raise RuntimeError("boom")
        return match(namespace, prompt)

    monkeypatch.setattr(fleet.core.tree, "match", fails_for_one)
    good, bad = fleet.submit(tokens(20), 5), fleet.submit(tokens(20), 5, namespace=b"poison")
    fleet.run()
    fleet.assert_answered(good)
    assert fleet.stream(bad).finish.reason is FinishReason.ERROR
    assert fleet.core.metrics.counters["internal_errors"] == 1
    assert_empty(fleet)


def test_an_exception_while_accepting_rejects_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = LocalFleet()
    refuse = fleet.core.door.refuse

    def fails_for_one(message: Any) -> Any:
        if message.request_id == "bad":
            raise RuntimeError("boom")
        return refuse(message)

    monkeypatch.setattr(fleet.core.door, "refuse", fails_for_one)
    fleet.submit(tokens(5), 5, rid="bad")
    good = fleet.submit(tokens(20), 5)
    fleet.run()
    assert fleet.tokenizer.rejected["bad"].code == "internal"
    fleet.assert_answered(good)


def test_scores_that_do_not_fit_end_that_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = LocalFleet(hello={"max_inflight_steps": 1})
    bad, good = fleet.submit(tokens(20), 5, logprobs=0), fleet.submit(tokens(20, seed=1), 5)
    fleet.turn()
    request = fleet.request(bad)

    def since(*_: Any) -> Any:
        raise RuntimeError("columns of different length")

    monkeypatch.setattr(type(request.scores), "since", since)
    fleet.run()
    fleet.run()
    assert fleet.stream(bad).finish.reason is FinishReason.ERROR
    fleet.assert_answered(good)


def test_a_result_that_cannot_be_settled_costs_the_worker_its_place_and_no_token() -> None:
    fleet = LocalFleet(hello={"max_inflight_steps": 2})
    rid = fleet.submit(tokens(20), 30)
    fleet.turn()
    worker = only_worker(fleet)
    result = worker.engine.execute(worker.commands.pop(0))
    impossible = RowScores(99, Scores(1))
    fleet.from_worker(worker, StepResult(result.step_id, fleet.EPOCH, 1, result.token_ids, scores=(impossible,)))
    fleet.turn()
    assert worker.reset is not None
    assert fleet.request(rid).state is State.WAITING
    del fleet.workers[worker.key]
    fleet.add_worker("w0", incarnation=2)
    fleet.run()
    fleet.assert_answered(rid)


def test_a_request_whose_steps_cannot_be_planned_ends_and_the_scheduler_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = LocalFleet(hello={"max_inflight_steps": 1})
    fleet.scheduler.checking = False  # it would raise
    bad = fleet.submit(tokens(20), 30)
    decode = fleet.core.planner._decode

    def fails_for_one(plan: Any, worker: Any, drafts: Any) -> None:
        if any(request.request_id == bad for request in worker.collect_decoding()):
            raise RuntimeError("boom")
        decode(plan, worker, drafts)

    monkeypatch.setattr(fleet.core.planner, "_decode", fails_for_one)
    for incarnation in range(2, 5):
        fleet.run()
        assert only_worker(fleet).reset is not None
        fleet.workers.clear()
        fleet.add_worker("w0", incarnation)
    fleet.run()
    assert fleet.stream(bad).finish.reason is FinishReason.ERROR
    assert only_worker(fleet).reset is None
    good = fleet.submit(tokens(20, seed=1), 5)
    fleet.run()
    fleet.assert_answered(good)


def test_a_stream_that_can_never_be_opened_is_given_up_and_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = LocalFleet()
    opening = fleet.core.outbox._stream_open

    def fails_for_one(request: Any) -> Any:
        if request.request_id == "bad":
            raise RuntimeError("boom")
        return opening(request)

    monkeypatch.setattr(fleet.core.outbox, "_stream_open", fails_for_one)
    fleet.submit(tokens(5), 5, rid="bad")
    good = fleet.submit(tokens(20), 5)
    for _ in range(5):
        fleet.run()
    fleet.assert_answered(good)
    assert not fleet.request("bad").live
    assert not fleet.core.outbox.touched
    assert fleet.core.metrics.counters["internal_errors"] == 2


def test_one_bad_message_does_not_take_the_rest_of_the_inbox_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = LocalFleet()

    def fails(*_: Any) -> bool:
        raise RuntimeError("boom")

    with monkeypatch.context() as patch:
        patch.setattr(fleet.core.frontends, "heard", fails)
        fleet.submit(tokens(5), 5, rid="bad")
        fleet.turn()
    fleet.submit(tokens(20), 5, rid="good")
    fleet.run()
    fleet.assert_answered("good")
    assert fleet.tokenizer.rejected["bad"].code == "internal"
