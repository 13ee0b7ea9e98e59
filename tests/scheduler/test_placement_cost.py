"""Where to compute, what to move, whom to wait for: by measured rates."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.migration_cost import Rates
from services.scheduler.worker import Worker
from tests.local_fleet import LocalFleet, tokens
from tests.local_peers import worker_hello

PROMPT = tokens(400)


def measured(workers: int, ms_per_token: float = 5.0, **hello: Any) -> LocalFleet:
    """A fleet that knows how fast each of its workers computes, with empty caches."""
    fleet = LocalFleet(workers=workers, hello={"kv_endpoints": ("ipc://kv",), **hello})
    fleet.turn()
    for worker in fleet.workers.values():
        worker.engine.ms_per_token = ms_per_token
    for worker in fleet.core.fleet:
        worker.prefill_rate = 1000 / ms_per_token
    return fleet


def put(fleet: LocalFleet, worker_id: str, prompt: list[int]) -> None:
    """Have that worker compute the prompt."""
    worker = next(worker for worker in fleet.core.fleet if worker.worker_id == worker_id)
    fleet.core.lifecycle.group_worker["put"] = worker
    rid = fleet.submit(prompt, 1, group_id="put")
    fleet.run()
    assert fleet.core.tree.match(b"", b"").hits == {}
    assert fleet.request(rid).finish is not None
    assert fleet.core.tree.cached_pages(worker.key) >= len(prompt) // 16


@pytest.mark.parametrize("workers", [2, 4])
def test_equal_prompts_that_arrive_together_are_computed_once(workers: int) -> None:
    fleet = measured(workers, max_slots=4)
    rids = [fleet.submit([*PROMPT, seed], 30) for seed in range(4 * workers)]
    fleet.run()
    fleet.assert_answered(*rids)
    assert fleet.prefill_tokens <= 400 + len(rids) * 17
    assert all(worker.engine.decode_rows for worker in fleet.workers.values()), "and nobody idles"
    assert fleet.core.metrics.counters["transferred_tokens"] == 400 * (workers - 1)


def test_without_a_way_to_move_pages_some_wait_and_some_compute() -> None:
    fleet = measured(2, max_slots=4, kv_endpoints=())
    rids = [fleet.submit([*PROMPT, seed], 30) for seed in range(8)]
    fleet.run()
    fleet.assert_answered(*rids)
    assert fleet.prefill_tokens <= 2 * (400 + 4 * 17)


@pytest.mark.parametrize(("bytes_per_s", "moves"), [(1e9, 1), (1e3, 0)])
def test_pages_move_only_where_that_is_faster_than_computing(bytes_per_s: float, moves: int) -> None:
    fleet = measured(2)
    put(fleet, "w0", PROMPT)
    fleet.core.migration.rates.bytes_per_s = bytes_per_s
    busy = [fleet.submit(tokens(600, seed=10 + s), 2, group_id="put") for s in range(5)]
    fleet.turn()
    rid = fleet.submit([*PROMPT, 7], 5)
    fleet.turn()
    assert len(fleet.core.migration.transfers) == moves
    fleet.run()
    fleet.assert_answered(rid, *busy)


def test_a_worker_with_the_prefix_and_little_to_do_keeps_its_requests() -> None:
    fleet = measured(2)
    put(fleet, "w0", PROMPT)
    rid = fleet.submit([*PROMPT, 7], 5)
    fleet.turn()
    worker = fleet.request(rid).worker
    assert worker is not None
    assert worker.worker_id == "w0"
    assert not fleet.core.migration.transfers


def test_a_fast_worker_takes_more() -> None:
    fleet = measured(2)
    slow, fast = fleet.core.fleet
    slow.prefill_rate, fast.prefill_rate = 50.0, 1000.0
    rids = [fleet.submit(tokens(200, seed=10 + s), 2) for s in range(8)]
    fleet.turn()
    homes = [request.worker for request in map(fleet.request, rids) if request.worker]
    assert homes.count(fast) > homes.count(slow)
    fleet.run()
    fleet.assert_answered(*rids)


def test_a_lost_computer_of_a_common_prompt_is_replaced() -> None:
    fleet = measured(3)
    rids = [fleet.submit([*PROMPT, seed], 10) for seed in range(3)]
    fleet.turn()
    [computing] = [worker for worker in fleet.workers.values() if worker.commands]
    fleet.step(computing)
    fleet.turn()
    fleet.lose_worker(computing)
    fleet.run()
    fleet.assert_answered(*rids)


class TestRates:
    @staticmethod
    def worker(rate: float) -> Worker:
        worker = Worker(b"w/1", worker_hello(), 2, 4, 128, 0.0)
        worker.prefill_rate = rate
        return worker

    def test_who_was_not_measured_is_like_the_others(self) -> None:
        known, new = self.worker(100.0), self.worker(0.0)
        assert Rates.prefill_rates([known, new]) == {known: 100.0, new: 100.0}
        assert Rates.prefill_rates([new]) == {new: 0.0}

    def test_small_differences_are_noise_and_large_ones_are_not(self) -> None:
        alike = [self.worker(rate) for rate in (95.0, 100.0, 105.0)]
        assert set(Rates.prefill_rates(alike).values()) == {100.0}
        slow, fast = self.worker(10.0), self.worker(90.0)
        assert Rates.prefill_rates([slow, fast]) == {slow: 10.0, fast: 90.0}

    def test_small_transfers_tell_the_delay_and_large_ones_the_rate(self) -> None:
        rates = Rates()
        for _ in range(50):
            rates.moved(1000, 0.01)
            rates.moved(100 << 20, 1.01)
        assert rates.delay_s == pytest.approx(0.01, rel=0.01)
        assert rates.bytes_per_s == pytest.approx(100 << 20, rel=0.01)
        assert rates.move_seconds(50 << 20) == pytest.approx(0.51, rel=0.02)
        rates.moved(5, 0.0)
        assert rates.delay_s > 0


def test_the_first_transfer_takes_the_place_of_the_guess() -> None:
    rates = Rates()
    assert rates.move_seconds(1 << 30) < 2  # hopeful, or a fast link would never be found out
    rates.moved(10 << 20, 10.0)
    assert rates.bytes_per_s == pytest.approx(1 << 20, rel=0.01)
    rates.moved(10 << 20, 1.0)
    assert rates.bytes_per_s < 4 << 20
