"""Cache tiers: pages that leave a worker's device stay in its host's memory, those that leave that on its disk.

A tier is in the tree as if it were a worker of its own: "id/incarnation#host". It holds whole paths, so what is
evicted brings those of its predecessors that the tier lacks, once. Leaves bringing pages back to migration.

    evicted from the device --KvStore--> host slots --KvStore--> disk slots        (each before the pages are reused)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
import structlog

from services.scheduler.metrics import Metrics
from services.scheduler.radix_tree import Evicted, RadixTree
from services.scheduler.worker import Tier, Worker
from shared import ints
from shared.messages.kv import KvEntry, KvInventory, KvStore, KvStored

log = structlog.get_logger(__name__)

MAX_UNDER_WAY = 256
"""Pages a tier may be behind with; what is evicted meanwhile is gone."""


class Tiers:
    def __init__(self, tree: RadixTree, metrics: Metrics) -> None:
        self._tree = tree
        self._metrics = metrics
        self._inventories: dict[str, list[KvEntry]] = {}  # by worker, while they come
        self.emptied: Callable[[str, str], None] = lambda reason, key: None  # nothing may come from there any more

    def join(self, worker: Worker) -> None:
        if not self._tree.enabled:
            return
        if worker.hello.host_pages > 0:
            self._add(worker, Tier(worker.key, "host", worker.hello.host_pages))
        if worker.hello.disk_pages > 0:
            self._add(worker, Tier(worker.key, "disk", worker.hello.disk_pages))

    def lose(self, worker: Worker) -> None:
        self._inventories.pop(worker.key, None)
        for tier in worker.tiers.values():
            self._tree.drop_worker(tier.key)
        worker.tiers.clear()
        worker.orders.clear()

    def clear(self, worker: Worker) -> None:
        """Forget what is not being brought back."""
        for tier in worker.tiers.values():
            tier.pool.release(self._tree.clear(tier.key))

    def empty(self, worker: Worker, name: str, reason: str) -> None:
        """The tier is not what it should be: none of it is used any more, and it starts anew."""
        tier = worker.tiers.get(name)
        if tier is None:
            return
        log.warning("cache tier emptied", worker=worker.key, tier=name, reason=reason)
        self._metrics.count("tiers_emptied")
        self.emptied(reason, tier.key)
        self._tree.drop_worker(tier.key)
        self._tree.add_worker(tier.key, observed=False)
        tier.pool = type(tier.pool)(tier.pool.num_pages)

    def keep(self, worker: Worker, gone: list[Evicted]) -> None:
        """Called when pages were evicted and before any other use of them is under way."""
        first = next(iter(worker.tiers.values()))
        for evicted in gone:
            self._store(worker, first, evicted, "device")

    def _add(self, worker: Worker, tier: Tier) -> None:
        worker.tiers[tier.name] = tier
        self._tree.add_worker(tier.key, observed=False)

    def _store(self, worker: Worker, tier: Tier, evicted: Evicted, source: Literal["device", "host"]) -> None:
        tree = self._tree
        lease = tree.acquire(tree.match(evicted.namespace, evicted.tokens), tier.key)
        tree.forget_copy(lease)
        held, start = lease.num_pages, lease.num_tokens
        # The first pages of a path are of use without the last ones.
        count = min(len(evicted.pages) - held, tier.pool.free + tree.evictable_pages(tier.key))
        pages = evicted.pages[held : held + count]
        tokens = evicted.tokens[4 * start : 4 * (start + count * tree.page_size)]
        room = tier.under_way + count <= MAX_UNDER_WAY
        slots = self._take_slots(worker, tier, len(pages)) if pages and room else None
        if slots is not None:
            path = [-1, *lease.pages, *slots]
            tier.order += 1
            tier.under_way += len(slots)
            tier.sizes.append(len(slots))
            tier.pool.release(tree.extend(lease, tokens, slots, tier.order))
            self._metrics.count(f"{tier.name}_stored_tokens", len(slots) * tree.page_size)
            order = KvStore(tier.order, tier.name, ints.pack(slots), source, ints.pack(pages))
            if tier.name == "disk":
                more = {"namespace": evicted.namespace, "tokens": tokens, "parents": ints.pack(path[held:-1])}
                order = msgspec.structs.replace(order, **more)
            worker.orders.append(order)
        tree.release(lease)

    def _take_slots(self, worker: Worker, tier: Tier, count: int) -> list[int] | None:
        missing = count - tier.pool.free
        if missing > self._tree.evictable_pages(tier.key):
            return None
        if missing > 0:
            gone: list[Evicted] = []
            tier.pool.release(self._tree.evict(tier.key, missing, gone))
            if tier.name == "host" and "disk" in worker.tiers:
                for evicted in gone:
                    self._store(worker, worker.tiers["disk"], evicted, "host")
        return tier.pool.allocate(count)

    # What workers say

    def stored(self, worker: Worker, message: KvStored) -> None:
        tier = worker.tiers.get(message.tier)
        if tier is None:
            return
        while tier.settled < min(message.order_id, tier.order):
            tier.settled += 1
            tier.under_way -= tier.sizes.popleft()
        if not message.ok:
            self.empty(worker, tier.name, message.detail)

    def inventory(self, worker: Worker, message: KvInventory) -> None:
        """What the disk has from a former life; believed before anything was stored in this one."""
        entries = self._inventories.setdefault(worker.key, [])
        entries += message.entries
        if not message.last:
            return
        del self._inventories[worker.key]
        tier = worker.tiers.get("disk")
        if tier is None or tier.order:
            return
        found = Inventory(entries, self._tree.page_size, tier.pool.num_pages)
        for namespace, tokens, slots in found.paths():
            self._insert(tier, namespace, tokens, slots)
        log.info("disk tier found again", worker=worker.key, pages=tier.pool.num_pages - tier.pool.free)

    def _insert(self, tier: Tier, namespace: bytes, tokens: bytes, slots: list[int]) -> None:
        tree = self._tree
        lease = tree.acquire(tree.match(namespace, tokens), tier.key)
        tree.forget_copy(lease)
        new = slots[lease.num_pages :]
        if new and len(tier.pool.claim(new)) == len(new):
            tier.pool.release(tree.extend(lease, tokens[4 * lease.num_tokens :], new, 0))
        tree.release(lease)


class Inventory:
    """Entries of a former life put together to paths; what does not fit is left out."""

    def __init__(self, entries: list[KvEntry], page_size: int, num_slots: int) -> None:
        self._entries: dict[int, KvEntry] = {}
        for entry in entries:
            known = entry.parent == -1 or self._fits(entry)
            if known and 0 <= entry.slot < num_slots and len(entry.tokens) == 4 * page_size:
                self._entries.setdefault(entry.slot, entry)

    def _fits(self, entry: KvEntry) -> bool:
        parent = self._entries.get(entry.parent)
        return parent is not None and parent.namespace == entry.namespace and entry.slot != entry.parent

    def paths(self) -> list[tuple[bytes, bytes, list[int]]]:
        """(namespace, tokens, slots) from the first token to each last page."""
        inner = {entry.parent for entry in self._entries.values()}
        found = []
        for slot in self._entries.keys() - inner:
            path = [self._entries[slot]]
            while path[-1].parent != -1:
                path.append(self._entries[path[-1].parent])
            path.reverse()
            found.append((path[0].namespace, b"".join(e.tokens for e in path), [e.slot for e in path]))
        return found
