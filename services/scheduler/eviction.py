"""What one worker holds in the tree: counters, live leases and the order of eviction. Leaves the nodes to the tree."""

from __future__ import annotations

from array import array
from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

from services.scheduler.tree_observer import TreeObserver

if TYPE_CHECKING:
    from services.scheduler.lease import Lease
    from services.scheduler.node import Copy

REBUILD_AT = 64  # dead entries; fewer are not worth a rebuild


class WorkerCache:
    """The cached pages of one worker.

    The queue is a lazy heap of (last_used, number, copy): a copy has at most one entry, which may be too old (then
    it is pushed again when it surfaces) or dead (then it is dropped), so touching a copy costs nothing.
    """

    def __init__(self, worker: str, observer: TreeObserver | None = None) -> None:
        self.worker = worker
        self.observer = observer
        self.alive = True
        self.cached = 0  # pages
        self.evictable = 0  # pages in unlocked copies, less the pinned ones
        self.freed: list[int] = []  # given back outside of evict
        self.leases: set[Lease] = set()
        self._heap: list[tuple[int, int, Copy]] = []
        self._numbers = count()
        self._dead = 0

    def lock(self, copy: Copy, stamp: int) -> None:
        if not copy.lock_ref:
            self.evictable -= copy.spare
        copy.lock_ref += 1
        copy.last_used = stamp

    def unlock(self, copy: Copy, stamp: int) -> None:
        copy.lock_ref -= 1
        copy.last_used = stamp
        if not copy.lock_ref:
            self.evictable += copy.spare
            self.offer(copy)

    def pin(self, copy: Copy) -> None:
        """Keep the copy's first page until `unpin`: it is about to be copied."""
        before = copy.spare
        copy.pins += 1
        if not copy.lock_ref:
            self.evictable += copy.spare - before

    def unpin(self, copy: Copy) -> None:
        before = copy.spare
        copy.pins -= 1
        if not copy.lock_ref:
            self.evictable += copy.spare - before
            self.offer(copy)

    def added(self, copy: Copy, num_pages: int) -> None:
        """The copy has `num_pages` more pages than before."""
        self.cached += num_pages
        if not copy.lock_ref:
            self.evictable += num_pages

    def removed(self, copy: Copy) -> array[int]:
        """The copy, which is evictable or a live lease's tail, leaves the tree; returns its pages, it has none now."""
        pages, copy.pages = copy.pages, array("i")
        self.cached -= len(pages)
        if not copy.lock_ref:
            self.evictable -= len(pages)
        if copy.queued:
            self._dead += 1
            self._shrink()
        if self.observer is not None:
            self.observer.removed(self.worker, pages)
        return pages

    def trimmed(self, copy: Copy, keep: int) -> array[int]:
        """Takes all pages but the first `keep` from an unlocked copy."""
        pages = copy.pages[keep:]
        del copy.pages[keep:]
        self.cached -= len(pages)
        self.evictable -= len(pages)
        self.offer(copy)
        if self.observer is not None:
            self.observer.removed(self.worker, pages)
        return pages

    def offer(self, copy: Copy) -> None:
        if not copy.queued and copy.evictable:
            copy.queued = True
            heappush(self._heap, (copy.last_used, next(self._numbers), copy))

    def least_recently_used(self) -> Copy | None:
        """Takes the evictable copy that was not used for the longest time off the queue."""
        while self._heap:
            stamp, _, copy = heappop(self._heap)
            copy.queued = False
            if not copy.pages:
                self._dead -= 1
            elif copy.evictable:
                if copy.last_used == stamp:
                    return copy
                self.offer(copy)
        return None

    def _shrink(self) -> None:
        if self._dead > REBUILD_AT and self._dead * 2 > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].pages]
            heapify(self._heap)
            self._dead = 0

    def check_queue(self, queued: int) -> None:
        """AssertionError unless the queue stands for exactly `queued` copies of the tree, none later than it may."""
        live = [entry for entry in self._heap if entry[2].pages]
        assert len(self._heap) - len(live) == self._dead, f"{self.worker}: dead entries of the queue are miscounted"
        assert len(live) == queued, f"{self.worker}: {queued} copies say they are queued, {len(live)} are"
        assert len({id(copy) for _, _, copy in live}) == queued, f"{self.worker}: a copy is queued twice"
        assert all(stamp <= copy.last_used for stamp, _, copy in live), f"{self.worker}: an entry is too new"
