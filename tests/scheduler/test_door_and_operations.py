"""Who is let in, and what operators may do."""

from __future__ import annotations

import json

import msgspec
import pytest

from shared.messages.request import Constraint, GenerateRequest, RequestRejected, SamplingParams
from shared.messages.stream import FinishReason
from tests.local_fleet import LocalFleet, tokens


def rejection(fleet: LocalFleet, rid: str) -> RequestRejected:
    fleet.turn()
    return fleet.tokenizer.rejected[rid]


def test_a_live_id_cannot_be_used_again_but_an_ended_one_can() -> None:
    fleet = LocalFleet()
    fleet.submit(tokens(10), 30, rid="r")
    fleet.turn()
    fleet.submit(tokens(11), 3, rid="r")
    assert rejection(fleet, "r").code == "duplicate_id"
    fleet.prompts["r"] = tokens(10)
    fleet.run()
    fleet.assert_answered("r")
    fleet.submit(tokens(11), 3, rid="r")
    fleet.run()
    fleet.assert_answered("r")


def test_constraints_are_refused() -> None:
    fleet = LocalFleet()
    rid = fleet.submit(tokens(10), 3, constraint=Constraint("regex", "a*"))
    assert rejection(fleet, rid).code == "bad_constraint"


def test_what_is_no_prompt_is_refused() -> None:
    fleet = LocalFleet()
    for rid, prompt in (
        ("empty", b""),
        ("odd", b"abc"),
        ("negative", b"\xff\xff\xff\xff"),
        ("huge", b"\xff\xff\xff\x7f"),
    ):
        fleet.from_tokenizer(GenerateRequest(rid, "t/1", prompt, SamplingParams()))
        assert rejection(fleet, rid).code == "internal"


def test_the_context_limits_as_the_pool_does() -> None:
    fleet = LocalFleet(hello={"max_context": 100})
    fits, too_long = fleet.submit(tokens(60), 40), fleet.submit(tokens(61), 40)
    fleet.run()
    fleet.assert_answered(fits)
    assert rejection(fleet, too_long).code == "too_long"
    assert fleet.core.board.build().max_request_tokens == 100


def test_the_largest_worker_sets_the_limit_and_gets_what_only_it_can_take() -> None:
    fleet = LocalFleet(workers=0)
    fleet.add_worker("small", num_pages=5)
    large = fleet.add_worker("large", num_pages=50)
    fleet.turn()
    rids = [fleet.submit(tokens(100, seed=i), 20) for i in range(3)]
    fleet.run()
    fleet.assert_answered(*rids)
    assert large.engine.prefill_tokens == 300


def test_a_request_that_waits_for_a_worker_of_its_size_ends_after_the_grace_time() -> None:
    fleet = LocalFleet(workers=0, worker_grace=5.0)
    rid = fleet.submit(tokens(100), 20)
    fleet.add_worker("small", num_pages=5)
    for _ in range(7):
        fleet.turn()
        fleet.clock.advance(1.0)
        fleet.heartbeats()
    fleet.turn()
    assert fleet.stream(rid).finish.reason is FinishReason.ERROR
    assert fleet.stream(rid).finish.status == 400


def test_full_queues_refuse_with_a_time_to_come_back() -> None:
    fleet = LocalFleet(workers=0, max_queued_requests=3, max_queued_tokens=100)
    for index in range(3):
        fleet.submit(tokens(10, seed=index), 3)
    fleet.turn()
    refused = rejection(fleet, fleet.submit(tokens(10), 3))
    assert refused.code == "queue_full"
    assert refused.retry_after_s > 0
    fleet = LocalFleet(workers=0, max_queued_tokens=100)
    fleet.submit(tokens(60), 3)
    assert rejection(fleet, fleet.submit(tokens(60), 3)).code == "queue_full"
    assert fleet.core.metrics.counters["requests_rejected"] == 1


def test_draining_refuses_newcomers_and_finishes_the_rest() -> None:
    fleet = LocalFleet()
    rid = fleet.submit(tokens(10), 30)
    fleet.turn()
    assert not fleet.scheduler.idle.is_set()
    fleet.scheduler.drain()
    assert rejection(fleet, fleet.submit(tokens(10), 3)).code == "draining"
    assert not fleet.core.board.build().ready
    fleet.run()
    fleet.assert_answered(rid)
    assert fleet.scheduler.idle.is_set()


def test_flushing_is_refused_while_anything_runs_or_waits() -> None:
    fleet = LocalFleet()
    rid = fleet.submit(tokens(50), 5)
    fleet.turn()
    assert not fleet.operate("flush_cache").ok
    fleet.run()
    fleet.assert_answered(rid)
    done = fleet.operate("flush_cache")
    assert done.ok
    worker = next(iter(fleet.core.fleet))
    assert worker.pool.free == worker.pool.num_pages
    again = fleet.submit(tokens(50), 5)
    fleet.run()
    assert fleet.stream(again).cached_tokens == 0
    fleet.assert_answered(again)


def test_a_flush_is_possible_as_soon_as_the_last_request_has_ended() -> None:
    fleet = LocalFleet(hello={"max_inflight_steps": 3})
    rid = fleet.submit(tokens(20), 500)
    fleet.turn()
    fleet.abort(rid)
    assert fleet.operate("flush_cache").ok  # steps of the ended request are still in flight
    other = fleet.submit(tokens(60, seed=2), 20)
    fleet.run()
    fleet.assert_answered(other)


def test_abort_all_ends_everything() -> None:
    fleet = LocalFleet(hello={"max_slots": 2})
    rids = [fleet.submit(tokens(20, seed=i), 50) for i in range(5)]
    fleet.turn()
    assert fleet.operate("abort_all").ok
    fleet.run()
    assert all(fleet.stream(rid).finish.reason is FinishReason.ABORT for rid in rids)


def test_pause_stops_new_steps_and_continue_goes_on() -> None:
    fleet = LocalFleet()
    rid = fleet.submit(tokens(20), 20)
    fleet.turn()
    assert fleet.operate("pause").ok
    fleet.run()
    held = len(fleet.request(rid).output)
    assert held == 2  # what was in flight
    late = fleet.submit(tokens(9), 3)
    fleet.run()
    assert not fleet.request(late).output
    assert fleet.operate("continue").ok
    fleet.run()
    fleet.assert_answered(rid, late)


def test_one_worker_can_be_drained_by_name() -> None:
    fleet = LocalFleet(workers=2)
    rids = [fleet.submit(tokens(20, seed=i), 20) for i in range(4)]
    fleet.turn()
    assert not fleet.operate("drain_worker", "nobody").ok
    assert fleet.operate("drain_worker", "w1").ok
    fleet.run()
    fleet.assert_answered(*rids)
    assert fleet.workers["w1/1"].drain is not None
    assert [worker.worker_id for worker in fleet.core.fleet] == ["w0"]


def test_reports_are_json_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.scheduler.operations.MAX_LISTED", 2)
    fleet = LocalFleet(hello={"max_slots": 2})
    rids = [fleet.submit(tokens(20, seed=i), 50) for i in range(5)]
    fleet.turn()
    requests = json.loads(fleet.operate("requests").body)
    assert requests["total"] == 5
    assert [row["request_id"] for row in requests["requests"]] == rids[:2]
    assert requests["requests"][0]["state"] == "running"
    workers = json.loads(fleet.operate("workers").body)["workers"]
    assert workers[0]["running"] == 2
    tree = json.loads(fleet.operate("tree").body)
    assert tree["workers"][0]["cached_pages"] > 0


def test_the_log_level_is_one_of_five() -> None:
    fleet = LocalFleet()
    assert not fleet.operate("set_log_level", "loud").ok
    assert fleet.operate("set_log_level", "info").ok


def test_the_status_shows_the_whole_system() -> None:
    fleet = LocalFleet(workers=2)
    rid = fleet.submit(tokens(40), 20)
    fleet.run()
    again = fleet.submit(tokens(40), 20)
    fleet.run()
    fleet.assert_answered(rid, again)
    for _ in range(3):
        fleet.clock.advance(1.0)
        fleet.heartbeats()
        fleet.turn()
    status = fleet.tokenizer.status
    assert status.ready
    assert status.epoch == fleet.EPOCH
    assert status.model == "fake"
    assert {worker.worker_id for worker in status.workers} == {"w0", "w1"}
    assert status.counters["cache_hit_tokens"] == 39
    assert status.counters["cache_miss_tokens"] == 41
    assert status.counters["prompt_tokens"] == 80
    assert status.counters["decode_tokens"] == 40
    assert status.counters["requests_finished"] == 2
    assert status.counters["max_total_tokens"] == 2 * 256 * 16
    assert status.counters["used_tokens"] == 0
    assert {service.service for service in status.services} == {"scheduler", "worker", "detokenizer", "tokenizer"}
    queue_time = next(s for s in status.services if s.service == "scheduler").histograms["queue_time"]
    assert queue_time[-2] == 2  # both requests were observed
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(status))


def test_the_status_comes_once_a_second_and_at_most_five_times() -> None:
    fleet = LocalFleet(workers=0)
    fleet.turn()
    before = fleet.tokenizer.num_statuses
    for _ in range(100):  # ten seconds without any change
        fleet.clock.advance(0.1)
        fleet.heartbeats()
        fleet.turn()
    assert 9 <= fleet.tokenizer.num_statuses - before <= 11
    before = fleet.tokenizer.num_statuses
    for index in range(200):  # ten seconds of change in every turn
        fleet.clock.advance(0.05)
        fleet.heartbeats()
        fleet.submit(tokens(3, seed=index), 3)
        fleet.turn()
    assert 40 <= fleet.tokenizer.num_statuses - before <= 52


def test_a_mismatch_when_idle_is_counted_and_nothing_falls() -> None:
    fleet = LocalFleet()
    rid = fleet.submit(tokens(40), 5)
    fleet.run()
    fleet.scheduler.tick()
    assert fleet.core.metrics.counters["invariant_violations"] == 0
    fleet.scheduler.checking = False
    worker = next(iter(fleet.core.fleet))
    worker.pool.allocate(1)  # a page nobody accounts for
    fleet.submit(tokens(40, seed=1), 5)
    fleet.run()
    fleet.scheduler.tick()
    fleet.scheduler.tick()
    assert fleet.core.metrics.counters["invariant_violations"] == 1
    fleet.assert_answered(rid)


def test_pause_may_abort_or_take_the_pages_away() -> None:
    fleet = LocalFleet()
    kept = fleet.submit(tokens(20), 20)
    fleet.turn()
    assert not fleet.operate("pause", "later").ok
    assert fleet.operate("pause", "retract").ok
    fleet.run()
    assert not fleet.core.lifecycle.num_running
    assert fleet.request(kept).retractions == 1
    assert fleet.operate("continue").ok
    fleet.run()
    fleet.assert_answered(kept)
    ended = fleet.submit(tokens(30, seed=5), 20)
    fleet.turn()
    assert fleet.operate("pause", "abort").ok
    fleet.run()
    assert fleet.stream(ended).finish.reason is FinishReason.ABORT
    assert fleet.operate("continue").ok
    after = fleet.submit(tokens(30, seed=5), 20)
    fleet.run()
    fleet.assert_answered(after)
