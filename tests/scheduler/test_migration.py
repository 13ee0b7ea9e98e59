"""Pages that move from worker to worker: who waits, what is quarantined, and what every failure leaves behind."""

from __future__ import annotations

import pytest

from services.scheduler.migration import SILENCE_S
from shared.messages.kv import KvDone, KvReady
from shared.messages.step import WorkerDrain
from shared.messages.stream import FinishReason
from tests.local_fleet import LocalFleet, tokens
from tests.local_peers import LocalWorker

PROMPT = tokens(200)
ENDPOINTS = {"kv_endpoints": ("ipc://kv",)}


def fleet_of(workers: int = 2, **hello: object) -> LocalFleet:
    """Computing a token takes 5 ms there, moving a page far less."""
    fleet = LocalFleet(workers=workers, hello={**ENDPOINTS, "max_slots": 4, **hello})
    for worker in fleet.workers.values():
        worker.engine.ms_per_token = 5.0
    return fleet


def warm(fleet: LocalFleet, prompt: list[int] = PROMPT) -> tuple[LocalWorker, LocalWorker]:
    """The worker that has computed the prompt, and the other one."""
    rid = fleet.submit(prompt, 2)
    fleet.turn()
    worker = fleet.request(rid).worker
    assert worker is not None
    source = fleet.workers[worker.key]
    fleet.run()
    return source, next(w for w in fleet.workers.values() if w is not source)


def keep_busy(fleet: LocalFleet, worker: LocalWorker) -> None:
    """All seats of the worker are taken for long."""
    seats = fleet.core.fleet.workers[worker.key.encode()].seats
    for seat in range(seats):
        fleet.submit(tokens(3, seed=100 + seat), 500, group_id=f"keep {worker.key}", rid=f"keep-{worker.key}-{seat}")


def overloaded() -> tuple[LocalFleet, LocalWorker, LocalWorker, str, int]:
    """The worker with the prompt has no seat left, so another request for it has its pages moved."""
    fleet = fleet_of()
    source, target = warm(fleet)
    group = f"keep {source.key}"
    fleet.core.lifecycle.group_worker[group] = fleet.core.fleet.workers[source.key.encode()]
    keep_busy(fleet, source)
    fleet.turn()
    for _ in range(3):
        fleet.step(source)
        fleet.turn()
    rid = fleet.submit([*PROMPT, 7], 10)
    fleet.turn()
    assert len(target.receives) == 1
    return fleet, source, target, rid, next(iter(target.receives))


def test_pages_move_and_count_as_hits() -> None:
    fleet, source, target, rid, number = overloaded()
    request = fleet.request(rid)
    assert request.transfer is not None
    assert request.slot == -1
    assert not source.sends, "nothing is sent before the target awaits it"
    quarantine = fleet.core.fleet.workers[target.key.encode()].quarantine
    assert len(quarantine[number]) == 200 // 16
    fleet.kv_ready(target, number)
    fleet.turn()
    assert list(source.sends) == [number]
    assert fleet.core.tree.cached_pages(target.key) == 0
    fleet.kv_move(number)
    fleet.turn()
    assert request.worker is not None
    assert request.worker.key == target.key
    assert request.cached_tokens == 192
    before = target.engine.prefill_tokens
    while request.live:
        fleet.step(target)
        fleet.turn()
    assert target.engine.prefill_tokens - before == 201 - 192
    fleet.assert_answered(rid)
    counters = fleet.core.metrics.counters
    assert (counters["transfers"], counters["transfers_failed"], counters["transferred_tokens"]) == (1, 0, 192)
    row = next(w for w in fleet.core.board.build().workers if w.worker_id == target.hello.worker_id)
    assert (row.kv_pages_in, row.kv_pages_out) == (12, 0)
    assert not fleet.core.migration.transfers


def test_requests_with_the_same_prefix_wait_for_the_same_transfer() -> None:
    fleet, source, target, rid, number = overloaded()
    other = fleet.submit([*PROMPT, 8], 10)
    fleet.turn()
    assert fleet.request(other).transfer is fleet.request(rid).transfer
    assert list(target.receives) == [number]
    fleet.abort(other)
    fleet.kv_ready(target, number)
    fleet.turn()
    fleet.kv_move(number)
    fleet.turn()
    assert fleet.request(rid).cached_tokens == 192
    assert not fleet.request(other).live


@pytest.mark.parametrize("when", ["before", "sending"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_losing_a_side_means_computing(side: str, when: str) -> None:
    fleet, source, target, rid, number = overloaded()
    if when == "sending":
        fleet.kv_ready(target, number)
        fleet.turn()
    fleet.lose_worker(source if side == "source" else target)
    fleet.turn()
    assert fleet.request(rid).transfer is None
    if side == "source":
        assert target.cancelled == [number]
        assert sum(len(p) for p in fleet.core.fleet.workers[target.key.encode()].quarantine.values()) == 12
    fleet.kv_obey_cancels()
    fleet.turn()
    assert not fleet.core.migration.transfers
    if side == "target":
        fleet.add_worker("w9")
    for worker in fleet.workers.values():
        worker.engine.ms_per_token = 0
    fleet.run()
    fleet.assert_answered(rid)


def test_a_slow_transfer_is_given_up_and_its_pages_wait_for_the_worker() -> None:
    fleet, source, target, rid, number = overloaded()
    fleet.kv_ready(target, number)
    fleet.turn()
    fleet.clock.advance(1.5)
    fleet.heartbeats()
    fleet.turn()
    assert source.cancelled == target.cancelled == [number]
    assert fleet.request(rid).worker is not None, "it computes at once"
    worker = fleet.core.fleet.workers[target.key.encode()]
    assert sum(len(p) for p in worker.quarantine.values()) == 12
    fleet.kv_move(number)  # too late: all of it arrives, and nothing of it is believed
    fleet.turn()
    assert not worker.quarantine
    assert not fleet.core.migration.transfers
    target.receives.clear()
    while fleet.request(rid).live:
        fleet.step(target)
        fleet.turn()
    fleet.assert_answered(rid)
    assert fleet.request(rid).cached_tokens == 0
    assert fleet.core.metrics.counters["transfers_failed"] == 1


def test_a_worker_that_never_answers_a_cancel_is_dropped() -> None:
    fleet, source, target, rid, number = overloaded()
    for _ in range(int(SILENCE_S) + 4):
        fleet.clock.advance(1.0)
        fleet.heartbeats()
        fleet.turn()
    assert target.key.encode() not in fleet.core.fleet.workers
    assert not fleet.core.migration.transfers


def test_spoilt_pages_are_computed_again() -> None:
    fleet, source, target, rid, number = overloaded()
    fleet.kv_ready(target, number)
    fleet.turn()
    fleet.kv_move(number, spoil=True)
    fleet.turn()
    request = fleet.request(rid)
    while request.live:
        fleet.step(target)
        fleet.turn()
    fleet.assert_answered(rid)
    assert request.cached_tokens == 0


def test_words_about_transfers_that_nobody_knows_change_nothing() -> None:
    fleet, source, target, rid, number = overloaded()
    fleet.from_worker(source, KvReady(number, 1))
    fleet.from_worker(source, KvReady(99, 1))
    fleet.from_worker(source, KvDone(number, 1, "received", ok=True))
    fleet.from_worker(source, KvDone(number, 1, "sent", ok=True))
    fleet.from_worker(target, KvDone(99, 1, "received", ok=True))
    fleet.turn()
    assert not source.sends
    assert fleet.request(rid).transfer is not None


def test_without_room_for_the_pages_nothing_moves() -> None:
    fleet = fleet_of(num_pages=30)
    source, target = warm(fleet)
    fleet.core.lifecycle.group_worker["keep"] = fleet.core.fleet.workers[source.key.encode()]
    for seat in range(4):
        fleet.submit(tokens(3, seed=100 + seat), 60, group_id="keep")
    fleet.turn()
    hog = fleet.submit(tokens(300, seed=5), 80)
    fleet.turn()
    assert fleet.request(hog).worker is not None
    rid = fleet.submit([*PROMPT, 7], 10)
    fleet.turn()
    assert not target.receives
    fleet.run()
    fleet.assert_answered(hog, rid)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("steps", [1, 4, 30])
def test_a_leaving_worker_gives_its_requests_away_with_their_pages(steps: int, recompute: bool) -> None:
    """With recompute off a request would end with an error if anything that is cached had to be computed."""
    fleet = LocalFleet(workers=2, page_size=4, recompute=recompute, hello={**ENDPOINTS, "page_size": 4})
    for worker in fleet.workers.values():
        worker.engine.ms_per_token = 5.0
    rids = [fleet.submit(tokens(90, seed=i), 60, group_id="together") for i in range(3)]
    fleet.turn()
    source = fleet.workers[fleet.request(rids[0]).worker.key]  # type: ignore[union-attr]
    target = next(worker for worker in fleet.workers.values() if worker is not source)
    for _ in range(steps):
        fleet.step(source)
        fleet.turn()
    fleet.from_worker(source, WorkerDrain(1, 1e6))
    fleet.run()
    fleet.assert_answered(*rids)
    assert source.drain is not None
    assert not fleet.core.migration.transfers
    computed = target.engine.prefill_tokens
    assert computed <= 3 * 5 if steps > 1 else computed <= 3 * 90
    assert fleet.core.metrics.counters["transferred_tokens"] >= (3 * 88 if steps > 1 else 0)


def test_a_worker_waits_for_its_pages_only_half_of_the_time_it_has() -> None:
    fleet = fleet_of()
    source, target = warm(fleet)
    rid = fleet.submit([*PROMPT, 7], 300)
    fleet.turn()
    for _ in range(3):
        fleet.step(source)
        fleet.turn()
    fleet.from_worker(source, WorkerDrain(1, 20.0))
    fleet.turn()
    while source.commands:
        fleet.step(source)
    fleet.turn()
    assert source.drain is None
    assert len(target.receives) == 1
    for second in range(10):
        while source.commands:
            fleet.step(source)
        assert source.drain is None, f"after {second} s"
        fleet.clock.advance(1.0)
        fleet.heartbeats()
        fleet.turn()
    assert source.drain is not None
    fleet.kv_obey_cancels()
    fleet.run()
    fleet.assert_answered(rid)


def test_proof_mode_ends_what_would_be_computed_again() -> None:
    fleet = LocalFleet(workers=2, hello=ENDPOINTS, recompute=False)
    rid = fleet.submit(PROMPT, 50)
    fleet.turn()
    source = fleet.workers[fleet.request(rid).worker.key]  # type: ignore[union-attr]
    target = next(worker for worker in fleet.workers.values() if worker is not source)
    for _ in range(3):
        fleet.step(source)
        fleet.turn()
    fleet.from_worker(source, WorkerDrain(1, 1e6))
    fleet.turn()
    while source.commands:
        fleet.step(source)
    fleet.turn()
    fleet.kv_ready(target, next(iter(target.receives)))
    fleet.turn()
    fleet.kv_move(next(iter(source.sends)), spoil=True)
    fleet.turn()
    finish = fleet.request(rid).finish
    assert finish is not None
    assert finish.reason is FinishReason.ERROR
    assert "switched off" in finish.message
