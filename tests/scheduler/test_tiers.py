"""Pages that leave the device: where they go, how they come back, what happens when a tier fails."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.tiers import MAX_UNDER_WAY, Inventory
from services.scheduler.worker import Worker
from shared import ints
from shared.messages.kv import KvEntry, KvInventory
from tests.local_fleet import LocalFleet, tokens
from tests.local_peers import LocalWorker

FIRST, SECOND, THIRD = (tokens(120, seed=s) for s in range(3))


def fleet_of(host: int = 0, disk: int = 0, *, recompute: bool = True, **hello: Any) -> tuple[LocalFleet, LocalWorker]:
    """A worker with ten pages and tiers, where computing a token takes 5 ms."""
    sizes = {"host_pages": host, "disk_pages": disk, "num_pages": 10, "max_batched_tokens": 256}
    fleet = LocalFleet(hello={**sizes, **hello}, recompute=recompute)
    fleet.turn()
    [worker] = fleet.workers.values()
    worker.engine.ms_per_token = 5.0
    return fleet, worker


def ask(fleet: LocalFleet, prompt: list[int], last: int = 7) -> tuple[str, int]:
    """The request, answered rightly, and how many tokens of its prompt were computed for it."""
    before = fleet.prefill_tokens
    rid = fleet.submit([*prompt, last], 4)
    fleet.run()
    fleet.assert_answered(rid)
    return rid, fleet.prefill_tokens - before


def home(fleet: LocalFleet) -> Worker:
    [worker] = fleet.core.fleet
    return worker


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(("host", "disk"), [(100, 0), (0, 100)])
def test_evicted_pages_come_back_from_their_tier(host: int, disk: int, recompute: bool) -> None:
    fleet, _ = fleet_of(host, disk, recompute=recompute)
    ask(fleet, FIRST)
    ask(fleet, SECOND)  # ten pages do not hold both
    rid, computed = ask(fleet, FIRST, 8)
    assert fleet.request(rid).cached_tokens == 112
    assert computed == 9
    name = "host" if host else "disk"
    counters = fleet.core.metrics.counters
    assert counters[f"{name}_stored_tokens"] >= 112
    assert counters[f"{name}_reloaded_tokens"] >= 16
    assert counters["transferred_tokens"] == 0


def test_what_leaves_the_memory_goes_to_the_disk_and_returns() -> None:
    fleet, worker = fleet_of(host=9, disk=100)
    for prompt in (FIRST, SECOND, THIRD, tokens(120, seed=9)):
        ask(fleet, prompt)
    assert any(tier == "disk" for tier, _ in worker.tiers)
    rid, computed = ask(fleet, FIRST, 8)
    assert computed == 9
    assert fleet.core.metrics.counters["disk_reloaded_tokens"] >= 16
    row = fleet.core.board.build().workers[0]
    assert 0 < row.host_pages_used <= row.host_pages == 9
    assert 0 < row.disk_pages_used <= row.disk_pages == 100


def test_a_tier_that_is_full_forgets_the_oldest() -> None:
    fleet, _ = fleet_of(host=9)
    for prompt in (FIRST, SECOND, THIRD, tokens(120, seed=9)):
        ask(fleet, prompt)
    assert ask(fleet, FIRST, 8)[1] == 121
    assert home(fleet).tiers["host"].pool.free >= 0


def test_pages_stay_in_their_tier_where_computing_is_faster() -> None:
    fleet, worker = fleet_of(host=100)
    ask(fleet, FIRST)
    ask(fleet, SECOND)
    fleet.core.migration.rates.tier_bytes_per_s["host"] = 1.0
    assert ask(fleet, FIRST, 8)[1] > 80
    assert fleet.core.metrics.counters["host_reloaded_tokens"] == 0


def test_a_tier_that_gives_nothing_back_is_emptied_and_the_request_computes() -> None:
    fleet, worker = fleet_of(host=100)
    ask(fleet, FIRST)
    ask(fleet, SECOND)
    rid = fleet.submit([*FIRST, 8], 4)
    fleet.turn()
    [number] = worker.loads
    fleet.kv_load(worker, number, spoil=True)
    fleet.run()
    fleet.assert_answered(rid)
    assert fleet.core.metrics.counters["tiers_emptied"] == 1
    assert fleet.request(rid).cached_tokens < 112


def test_a_tier_that_cannot_keep_is_emptied() -> None:
    fleet, worker = fleet_of(host=100)
    ask(fleet, FIRST)
    rid = fleet.submit([*SECOND, 7], 4)
    fleet.turn()
    assert worker.stores
    fleet.kv_store(worker, ok=False)
    fleet.run()
    fleet.assert_answered(rid)
    assert fleet.core.metrics.counters["tiers_emptied"] == 1
    assert ask(fleet, FIRST, 8)[1] > 80


def test_pages_are_not_brought_back_before_they_are_kept() -> None:
    fleet, worker = fleet_of(host=100)
    ask(fleet, FIRST)
    held, worker.stores = worker.stores, []
    rid = fleet.submit([*SECOND, 7], 1)
    fleet.turn()
    orders, worker.stores = worker.stores, []
    assert orders
    assert not held
    other = fleet.submit([*FIRST, 8], 1)
    fleet.turn()
    assert not worker.loads
    worker.stores = orders
    fleet.run()
    fleet.assert_answered(rid, other)


def test_a_tier_is_not_given_more_than_it_can_take() -> None:
    fleet, worker = fleet_of(host=4 * MAX_UNDER_WAY, num_pages=2 * MAX_UNDER_WAY)
    tier = home(fleet).tiers["host"]
    for seed in range(12):
        fleet.submit(tokens(1600, seed=20 + seed), 1)
        for _ in range(40):
            fleet.turn()
            if worker.commands:
                orders, worker.stores = worker.stores, []
                fleet.step(worker)
                worker.stores = orders + worker.stores
    assert 0 < tier.under_way <= MAX_UNDER_WAY
    worker.stores = [(0, order) for _, order in worker.stores]


def test_a_new_life_has_the_disk_and_nothing_else() -> None:
    fleet, worker = fleet_of(host=100, disk=100)
    ask(fleet, FIRST)
    ask(fleet, SECOND)
    fleet.lose_worker(worker)
    fleet.turn()
    again = fleet.add_worker("w0", 2, disk_pages=100)
    again.engine.ms_per_token = 5.0
    fleet.turn()
    home(fleet).prefill_rate = 200.0
    pages = [(FIRST[i : i + 16], slot) for slot, i in enumerate(range(0, 112, 16))]
    cells = {}
    state_fleet, other = fleet_of()
    ask(state_fleet, FIRST)
    lease = state_fleet.core.tree.match(b"", ints.pack(FIRST))
    copy = state_fleet.core.tree.acquire(lease, other.key)
    for (_, slot), page in zip(pages, copy.pages, strict=True):
        cells["disk", slot] = other.engine.read_page(page)
    again.tiers.update(cells)
    entries = tuple(KvEntry(slot, slot - 1, b"", ints.pack(text)) for text, slot in pages)
    fleet.from_worker(again, KvInventory(2, entries[:3], last=False))
    fleet.from_worker(again, KvInventory(2, entries[3:], last=True))
    fleet.turn()
    assert home(fleet).tiers["disk"].pool.free == 93
    rid, computed = ask(fleet, FIRST, 8)
    assert computed == 9
    assert fleet.request(rid).cached_tokens == 112


def test_an_inventory_that_does_not_fit_together_is_left_out() -> None:
    def entry(slot: int, parent: int, namespace: bytes = b"", size: int = 4) -> KvEntry:
        return KvEntry(slot, parent, namespace, ints.pack([slot] * size))

    entries = [
        entry(0, -1),
        entry(1, 0),
        entry(2, 0),
        entry(3, 9),  # its parent is not there
        entry(4, 1, b"x"),  # nor in the same namespace
        entry(5, 1, size=3),
        entry(99, -1),  # beyond the tier
        entry(1, -1),  # twice
        entry(6, 6),
    ]
    paths = Inventory(entries, 4, 16).paths()
    assert sorted(slots for _, _, slots in paths) == [[0, 1], [0, 2]]


def test_a_flush_empties_the_tiers() -> None:
    fleet, _ = fleet_of(host=100)
    ask(fleet, FIRST)
    ask(fleet, SECOND)
    assert home(fleet).tiers["host"].pool.free < 100
    assert fleet.operate("flush_cache").ok
    assert home(fleet).tiers["host"].pool.free == 100
    assert ask(fleet, FIRST, 8)[1] == 121
