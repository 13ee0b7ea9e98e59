"""Paths of the tree that stay although no request runs on them: a batch's common prefix, a script between two steps.

    request ends --hold--> pinned --drop (its owner), expire (its time is over), yield (pages ran out)--> evictable

A pin protects its pages from eviction as long as there is anything else to evict, and never keeps a request waiting.
Leaves when pages run out to seats.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from services.scheduler.lease import Lease
from services.scheduler.node import Copy, Node
from services.scheduler.radix_tree import RadixTree
from shared.clock import Clock

MAX_PINS = 256
MAX_SECONDS = 3600.0
MAX_SHARE = 0.5
"""Of a worker's pages: what goes beyond is not pinned, only cached."""


@dataclass(slots=True, eq=False)
class Pin:
    lease: Lease
    until: float


class Pins:
    """By name; a name has one pin, the last one. The oldest go first where there are too many."""

    def __init__(self, tree: RadixTree, clock: Clock) -> None:
        self._tree = tree
        self._clock = clock
        self._pins: dict[str, Pin] = {}

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, name: str) -> bool:
        return name in self._pins

    def hold(self, name: str, lease: Lease, seconds: float, num_pages: int) -> None:
        """Take over the lease of a request that has ended on a worker of `num_pages` pages."""
        self.drop(name)
        if lease.void or self.pages(lease.worker) + lease.num_pages > MAX_SHARE * num_pages:
            self._tree.release(lease)
            return
        self._tree.forget_copy(lease)
        self._pins[name] = Pin(lease, self._clock.now() + min(seconds, MAX_SECONDS))
        if len(self._pins) > MAX_PINS:
            self.drop(next(iter(self._pins)))

    def drop(self, name: str) -> bool:
        """Whether there was one."""
        pin = self._pins.pop(name, None)
        if pin is not None:
            self._tree.release(pin.lease)
        return pin is not None

    def clear(self) -> None:
        for name in list(self._pins):
            self.drop(name)

    def expire(self) -> None:
        """Called about twice a second."""
        now = self._clock.now()
        for name in [name for name, pin in self._pins.items() if pin.until <= now or pin.lease.void]:
            self.drop(name)

    def pages(self, worker: str) -> int:
        """Pages of all pins there, those that several share counted for each."""
        return sum(pin.lease.num_pages for pin in self._pins.values() if pin.lease.worker == worker)

    def reclaimable(self, worker: str) -> int:
        """Pages that nobody but pins keeps from being evicted there."""
        locks: Counter[int] = Counter()
        copies: dict[int, Copy] = {}
        for pin in self._pins.values():
            if pin.lease.worker == worker and not pin.lease.void:
                for copy in _locked(pin.lease):
                    locks[id(copy)] += 1
                    copies[id(copy)] = copy
        return sum(copy.spare for key, copy in copies.items() if copy.lock_ref == locks[key])

    def make_room(self, worker: str, num_pages: int) -> None:
        """Let pins go, the oldest first, until so many pages can be evicted there or none is left."""
        for name in [name for name, pin in self._pins.items() if pin.lease.worker == worker]:
            if self._tree.evictable_pages(worker) >= num_pages:
                return
            self.drop(name)


def _locked(lease: Lease) -> list[Copy]:
    """Every copy on the lease's path, its tail included."""
    found = [lease.tail] if lease.tail is not None else []
    node: Node | None = lease.node
    while node is not None:
        found.append(node.copies[lease.worker])
        node = node.parent
    return found
