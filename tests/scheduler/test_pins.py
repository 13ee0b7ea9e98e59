"""Pinned paths: they survive eviction, end with their owner or their time, and never keep a request waiting."""

from __future__ import annotations

from typing import Any

from tests.local_fleet import LocalFleet, tokens

PREFIX = tokens(64)


def fleet_of(num_pages: int = 16, **changes: Any) -> LocalFleet:
    return LocalFleet(hello={"num_pages": num_pages, **changes})


def pin(fleet: LocalFleet, name: str = "p", seconds: float = 60.0, prompt: list[int] = PREFIX) -> str:
    """Compute a prompt, generate nothing, keep it."""
    rid = fleet.submit(prompt, 0, pin=name, pin_s=seconds)
    fleet.run()
    return rid


def press(fleet: LocalFleet, rounds: int = 6) -> None:
    """Other prompts that together need more pages than there are."""
    for seed in range(rounds):
        rid = fleet.submit(tokens(80, seed=100 + seed), 4)
        fleet.run()
        fleet.assert_answered(rid)


def cached(fleet: LocalFleet, prompt: list[int] = PREFIX) -> int:
    rid = fleet.submit([*prompt, 1, 2], 2)
    fleet.run()
    fleet.assert_answered(rid)
    return fleet.stream(rid).cached_tokens


def test_a_pinned_prefix_survives_what_evicts_others() -> None:
    fleet = fleet_of()
    pin(fleet)
    press(fleet)
    assert fleet.core.metrics.counters["evicted_tokens"] > 0
    assert cached(fleet) == len(PREFIX)
    unpinned = fleet_of()
    rid = unpinned.submit(PREFIX, 0)
    unpinned.run()
    press(unpinned)
    assert unpinned.request(rid).finish is not None
    assert cached(unpinned) < len(PREFIX)


def test_the_owner_ends_it() -> None:
    fleet = fleet_of()
    pin(fleet)
    assert fleet.core.board.build().counters["pinned_tokens"] == len(PREFIX)
    assert fleet.operate("unpin", "p").detail == ""
    assert fleet.operate("unpin", "p").detail == "no such pin"
    assert fleet.core.board.build().counters["pinned_tokens"] == 0
    press(fleet)
    assert cached(fleet) < len(PREFIX)


def test_its_time_ends_it() -> None:
    fleet = fleet_of()
    pin(fleet, seconds=2.0)
    fleet.clock.advance(1.0)
    fleet.heartbeats()
    fleet.turn()
    assert "p" in fleet.core.pins
    fleet.clock.advance(1.5)
    fleet.heartbeats()
    fleet.turn()
    assert "p" not in fleet.core.pins


def test_a_pin_moves_on_with_its_name() -> None:
    """Steps of a script: each continues the one before; between two of them the path is pinned."""
    fleet = fleet_of()
    first = fleet.submit(PREFIX, 8, pin="s", pin_s=30.0)
    fleet.run()
    fleet.assert_answered(first)
    press(fleet)
    longer = [*PREFIX, *fleet.stream(first).tokens, 5, 6]
    second = fleet.submit(longer, 8, pin="s")
    fleet.turn()
    assert "s" not in fleet.core.pins  # its own lease holds the path
    fleet.run()
    fleet.assert_answered(second)
    assert fleet.stream(second).cached_tokens >= len(PREFIX) + 7
    assert "s" not in fleet.core.pins


def test_pins_make_room_before_anybody_waits_for_it() -> None:
    """A request that needs the whole pool, alone on its worker."""
    fleet = fleet_of()
    pin(fleet)
    assert "p" in fleet.core.pins
    rid = fleet.submit(tokens(200, seed=7), 40)
    fleet.run()
    fleet.assert_answered(rid)
    assert "p" not in fleet.core.pins


def test_pins_make_room_before_anybody_is_suspended() -> None:
    fleet = fleet_of(num_pages=20)
    for index in range(2):
        pin(fleet, f"p{index}", prompt=tokens(64, seed=index))
    rids = [fleet.submit(tokens(60, seed=50 + i), 80) for i in range(2)]
    fleet.run()
    fleet.assert_answered(*rids)
    assert fleet.core.metrics.counters["retractions"] == 0
    assert "p0" not in fleet.core.pins  # the oldest goes first


def test_what_would_take_too_much_is_only_cached() -> None:
    fleet = fleet_of()
    pin(fleet, prompt=tokens(16 * 9))
    assert "p" not in fleet.core.pins
    assert cached(fleet, tokens(16 * 9)) == 16 * 9


def test_aborted_requests_pin_nothing_and_a_flush_ends_all() -> None:
    fleet = fleet_of()
    rid = fleet.submit(PREFIX, 50, pin="p", pin_s=60.0)
    fleet.turn()
    fleet.abort(rid)
    fleet.run()
    assert "p" not in fleet.core.pins
    pin(fleet)
    assert fleet.operate("flush_cache").ok
    worker = next(iter(fleet.core.fleet))
    assert worker.pool.free == worker.pool.num_pages


def test_a_lost_worker_takes_its_pins_along() -> None:
    fleet = LocalFleet(workers=2, hello={"num_pages": 16})
    pin(fleet)
    home = fleet.core.pins._pins["p"].lease.worker
    fleet.lose_worker(fleet.workers[home])
    fleet.clock.advance(1.0)
    fleet.heartbeats()
    fleet.turn()
    assert "p" not in fleet.core.pins
    pin(fleet)
    assert cached(fleet) == len(PREFIX)


def test_the_next_step_of_a_script_is_let_in_though_the_queue_is_full() -> None:
    fleet = LocalFleet(hello={"num_pages": 16, "max_slots": 1}, max_queued_requests=1)
    first = fleet.submit(PREFIX, 4, pin="s", pin_s=30.0)
    fleet.run()
    longer = [*PREFIX, *fleet.stream(first).tokens]
    running = fleet.submit(tokens(20, seed=1), 30)
    fleet.turn()
    waiting = fleet.submit(tokens(20, seed=2), 4)
    refused = fleet.submit(tokens(20, seed=3), 4)
    second = fleet.submit(longer, 4, pin="s", priority=1)
    fleet.run()
    assert fleet.tokenizer.rejected[refused].code == "queue_full"
    fleet.assert_answered(running, waiting, second)
    assert fleet.request(second).arrival == fleet.request(waiting).arrival
    order = [rid for rid in fleet.core.lifecycle.finished if rid in (waiting, second)]
    assert order == [second, waiting]


def test_steps_of_a_group_stay_with_the_worker_that_has_their_pages() -> None:
    fleet = LocalFleet(workers=2, hello={"num_pages": 32})
    first = fleet.submit(PREFIX, 4, pin="s", pin_s=30.0, group_id="g")
    fleet.run()
    [home] = [worker for worker in fleet.workers.values() if worker.engine.prefill_tokens]
    busy = [fleet.submit(tokens(40, seed=i), 20) for i in range(3)]
    fleet.turn()
    before = home.engine.prefill_tokens
    second = fleet.submit([*PREFIX, *fleet.stream(first).tokens, 3], 4, pin="s", group_id="g")
    fleet.run()
    fleet.assert_answered(second, *busy)
    assert fleet.stream(second).cached_tokens >= len(PREFIX) + 3
    assert home.engine.prefill_tokens > before
