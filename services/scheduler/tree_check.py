"""The tree's invariants, in pieces so that a large tree can be checked in idle time. Only reads; asserts."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from services.scheduler.eviction import WorkerCache
from services.scheduler.lease import Lease
from services.scheduler.node import TOKEN_BYTES, Copy, Node
from services.scheduler.node_store import NodeStore

NODES_AT_ONCE = 64


@dataclass(slots=True)
class Totals:
    """What one worker's copies add up to."""

    cached: int = 0
    evictable: int = 0
    pages: set[int] = field(default_factory=set)
    queued: int = 0


def audit(store: NodeStore) -> Iterator[None]:
    """Yields between pieces of about 64 nodes; the store must not change meanwhile. AssertionError: what is wrong."""
    totals = {worker: Totals() for worker in store.caches}
    locks, pins = _expected_refs(store)
    count = 0
    for root in list(store.roots.values()):
        assert root.copies, f"namespace {root.key!r} has a root that nobody holds"
        assert root.parent is None, "a root has a parent"
        assert not root.tokens, "a root has tokens"
        stack = [root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            count += node is not root
            _check_node(store, node)
            for worker, copy in node.copies.items():
                _check_copy(store, worker, copy, locks, pins)
                _add(totals[worker], copy)
            if count % NODES_AT_ONCE == 0:
                yield
    assert count == store.num_nodes, f"{count} nodes are reachable, {store.num_nodes} are counted"
    assert not locks, f"{len(locks)} locked copies are not in the tree"
    assert not pins, f"{len(pins)} pinned copies are not in the tree"
    for worker, cache in store.caches.items():
        _check_totals(cache, totals[worker])
        for lease in cache.leases:
            _check_lease(store, lease)
            yield


def _expected_refs(store: NodeStore) -> tuple[Counter[Copy], Counter[Copy]]:
    """lock_ref and pins of every copy, as the live leases demand them."""
    locks: Counter[Copy] = Counter()
    pins: Counter[Copy] = Counter()
    for worker, cache in store.caches.items():
        assert cache.alive, f"{worker}: a dropped worker is still here"
        for lease in cache.leases:
            assert not lease.released, f"{worker}: a released lease counts as live"
            assert lease.cache is cache, f"{worker}: another worker's lease counts here"
            if lease.tail is not None:
                locks[lease.tail] += 1
            if lease.source is not None and lease.source.pages:
                pins[lease.source] += 1
            node: Node | None = lease.node
            while node is not None:
                assert worker in node.copies, f"{worker}: a lease's path lacks a copy"
                locks[node.copies[worker]] += 1
                node = node.parent
    return locks, pins


def _check_node(store: NodeStore, node: Node) -> None:
    for key, child in node.children.items():
        assert child.parent is node, f"a child of {_name(node)} has another parent"
        assert child.key == key, f"a child of {_name(node)} has another key"
    if node.parent is None:
        return
    size = len(node.tokens)
    assert node.copies, f"nobody holds {_name(node)}"
    assert node.key == node.tokens[: store.page_bytes], f"{_name(node)} has the key of other tokens"
    assert size, f"{_name(node)} has no tokens"
    assert size % TOKEN_BYTES == 0, f"{_name(node)} has {size} bytes of tokens"
    if size % store.page_bytes:
        assert size < store.page_bytes, f"{_name(node)} has full pages and a partial one"
        assert not node.children, f"{_name(node)} is a partial page with children"
    assert size <= store.max_node_pages * store.page_bytes, f"{_name(node)} is too long"


def _check_copy(store: NodeStore, worker: str, copy: Copy, locks: Counter[Copy], pins: Counter[Copy]) -> None:
    node = copy.node
    assert node.copies[worker] is copy, f"{_name(node)} on {worker}: the copy belongs to another node"
    assert worker in store.caches, f"{_name(node)} on {worker}: the worker is unknown"
    assert len(copy.pages) == -(-len(node.tokens) // store.page_bytes), (
        f"{_name(node)} on {worker} has {len(copy.pages)} pages"
    )
    below = sorted(key for key, child in node.children.items() if worker in child.copies)
    assert copy.keys == below, f"{_name(node)} on {worker}: the keys are not those of the children it holds"
    assert copy.lock_ref == locks.pop(copy, 0), (
        f"{_name(node)} on {worker}: lock_ref {copy.lock_ref} is not what the leases hold"
    )
    assert copy.pins == pins.pop(copy, 0), f"{_name(node)} on {worker}: {copy.pins} pins are not what the leases hold"
    assert copy.queued or not copy.evictable, f"{_name(node)} on {worker} can be evicted but is not queued"
    if node.parent is None:
        assert copy.keys or copy.lock_ref, f"{_name(node)} on {worker}: the root's copy is of no use"
        return
    above = node.parent.copies.get(worker)
    assert above is not None, f"{_name(node)} on {worker}: the parent has no copy"
    assert above.lock_ref >= copy.lock_ref, f"{_name(node)} on {worker}: locked more often than its parent"
    assert copy.lock_ref or node.parent.parent is None or above.last_used >= copy.last_used, (
        f"{_name(node)} on {worker}: parent is older"
    )


def _add(totals: Totals, copy: Copy) -> None:
    before = len(totals.pages)
    totals.pages.update(copy.pages)
    assert len(totals.pages) == before + len(copy.pages), f"{_name(copy.node)}: a page is in the tree twice"
    totals.cached += len(copy.pages)
    totals.queued += copy.queued
    if not copy.lock_ref:
        totals.evictable += copy.spare


def _check_totals(cache: WorkerCache, totals: Totals) -> None:
    worker = cache.worker
    assert cache.cached == totals.cached, f"{worker}: {totals.cached} pages cached, {cache.cached} counted"
    assert cache.evictable == totals.evictable, f"{worker}: {totals.evictable} evictable, {cache.evictable} counted"
    assert totals.pages.isdisjoint(cache.freed), f"{worker}: a page is held and freed"
    assert len(set(cache.freed)) == len(cache.freed), f"{worker}: a page was freed twice"
    cache.check_queue(totals.queued)


def _check_lease(store: NodeStore, lease: Lease) -> None:
    worker = lease.worker
    path: list[array[int]] = []
    node: Node | None = lease.node
    root = lease.node
    while node is not None:
        assert len(node.tokens) % store.page_bytes == 0, f"{worker}: a lease stands on a partial page"
        path.append(node.copies[worker].pages)
        root, node = node, node.parent
    assert store.roots.get(lease.namespace) is root, f"{worker}: a lease is outside its namespace"
    held = array("i", chain.from_iterable(reversed(path)))
    assert held == lease.pages, f"{worker}: a lease's pages are not those of its path"
    tail = lease.tail
    if tail is None:
        assert (lease.tail_page, lease.tail_tokens) == (-1, 0), f"{worker}: a lease has half a tail"
        return
    assert tail.node.parent is lease.node, f"{worker}: a lease's tail is elsewhere"
    assert tail.pages.tolist() == [lease.tail_page], f"{worker}: a lease's tail is another page"
    assert len(tail.node.tokens) == lease.tail_tokens * TOKEN_BYTES, f"{worker}: a lease's tail has other tokens"


def _name(node: Node) -> str:
    """Tokens and place of a node, short."""
    start, above = 0, node.parent
    while above is not None:
        start += len(above.tokens) // TOKEN_BYTES
        above = above.parent
    return f"node at {start} of {len(node.tokens) // TOKEN_BYTES} tokens"
