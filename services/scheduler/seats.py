"""A seat is a slot, a lease on the tree and pages: taken and left here, nowhere else. Leaves who and when to others."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from services.scheduler.metrics import Metrics
from services.scheduler.pins import Pins
from services.scheduler.radix_tree import Evicted, Lease, RadixTree
from services.scheduler.request import Request
from services.scheduler.worker import Worker


class Seats:
    """Every page of a worker is free, held by the tree, or in one request's `own`."""

    def __init__(self, tree: RadixTree, metrics: Metrics, pins: Pins) -> None:
        self.tree = tree
        self.pins = pins
        self.keep: Callable[[Worker, list[Evicted]], None] = lambda worker, gone: None  # set where there are tiers
        self._metrics = metrics

    def available(self, worker: Worker) -> int:
        """Pages that can be had without taking a seat away; pins on a worker where nothing runs are in nobody's way."""
        pages = worker.pool.free + self.tree.evictable_pages(worker.key)
        return pages if worker.running or not len(self.pins) else pages + self.pins.reclaimable(worker.key)

    def take_pages(self, worker: Worker, count: int) -> list[int] | None:
        """`count` pages, evicting least recently used ones; None where there are not so many."""
        missing = count - worker.pool.free
        if missing > 0:
            if missing > self.tree.evictable_pages(worker.key):
                self.pins.make_room(worker.key, missing)
            if missing > self.tree.evictable_pages(worker.key):
                return None
            gone: list[Evicted] | None = [] if worker.tiers else None
            freed = self.tree.evict(worker.key, missing, gone)
            if gone:
                self.keep(worker, gone)
            self._metrics.count("evicted_tokens", len(freed) * self.tree.page_size)
            worker.pool.release(freed)
        return worker.pool.allocate(count)

    def take(self, worker: Worker, request: Request, lease: Lease, pages: list[int], num_computed: int) -> None:
        """Seat the request on the lease's pages and its own ones, `num_computed` tokens being there already."""
        request.worker = worker
        request.lease = lease
        request.pages = array("i", lease.pages)
        request.pages.extend(pages)
        request.own = set(pages)
        request.prefill_end = request.known
        request.prefill_tokens = request.tokens(0, request.known)
        request.dispatched = num_computed
        request.set_barrier(self.tree.page_size)
        request.set_check(self.tree.page_size)
        request.slot = worker.seat(request)

    def append_page(self, request: Request, page: int) -> None:
        request.pages.append(page)
        request.own.add(page)
        request.capacity += self.tree.page_size
        request.barrier = min(request.capacity, request.row_end - 1)

    def grow(self, worker: Worker, request: Request, end: int) -> list[int]:
        """Give the request what pages it lacks for positions up to `end`, all or none; returns them."""
        missing = -(-end // self.tree.page_size) - len(request.pages)
        pages = (self.take_pages(worker, missing) or []) if missing > 0 else []
        for page in pages:
            self.append_page(request, page)
        return pages

    def store(self, request: Request, end: int, ready_step: int = -1) -> None:
        """Let the tree have the pages of positions up to `end`; what it has already stays the request's own."""
        lease, page_size = request.lease, self.tree.page_size
        if lease is None or not self.tree.enabled:
            return
        num_pages = lease.num_pages
        start = num_pages * page_size
        if end <= start + lease.tail_tokens:
            return
        pages = request.pages[num_pages : -(-end // page_size)]
        refused = self.tree.extend(lease, request.tokens(start, end), pages, ready_step)
        request.own.difference_update(pages)
        if refused:
            request.own.update(refused)

    def leave(self, request: Request, *, pin: bool = False) -> None:
        """Keep what is written in the tree and free the rest; `pin`: as its message asks, nobody may evict it yet.

        The pages may be written again by the very command that closes the slot: a worker is a FIFO, and
        the close is the first thing that command does.
        """
        worker, lease = request.worker, request.lease
        assert worker is not None
        assert lease is not None
        # What is in flight fills its pages before any later command reads them, but not before a transfer would.
        self.store(request, request.written, worker.next_step_id - 1 if request.inflight_rows else -1)
        if pin and request.message.pin_s > 0:
            self.pins.hold(request.message.pin, lease, request.message.pin_s, worker.hello.num_pages)
        else:
            self.tree.release(lease)
        worker.pool.release(request.own)
        worker.unseat(request)
        self._clear(request)

    def lose(self, request: Request) -> None:
        """The worker is gone, and the tree has dropped it: there is nothing to give back."""
        if request.lease is not None:
            self.tree.release(request.lease)
        self._clear(request)

    def reclaim(self, worker: Worker) -> None:
        """Pages the tree had twice."""
        freed = self.tree.take_freed(worker.key)
        if freed:
            worker.pool.release(freed)

    @staticmethod
    def _clear(request: Request) -> None:
        request.worker = None
        request.lease = None
        request.slot = -1
        request.pages = array("i")
        request.own = set()
        request.prefill_tokens = b""
        request.guessed, request.ahead = b"", None
        request.check_at = 0  # every result that still comes is looked at
