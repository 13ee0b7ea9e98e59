"""Pages on their way from one worker to another: leases, quarantine, deadlines. Leaves whether to move to placement.

    start: lease on both sides, pages of the target in quarantine
    no step in flight there is older than that                        KvReceive -> target
    KvReady  <- target                                                KvSend    -> source
    KvDone   <- source: its lease is released
    KvDone   <- target: the pages enter the tree (or are free again), its lease is released
    failure of any kind, deadline: KvCancel to whoever is not through; the requests are placed anew and compute

Pages in quarantine are nobody's until their worker is through with them or lost: nothing that fails can write into a
page that has another owner. They are inserted by their tokens, since nodes may be split meanwhile.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import structlog

from services.scheduler.fleet import Fleet
from services.scheduler.metrics import Metrics
from services.scheduler.migration_cost import Rates
from services.scheduler.migration_source import Source
from services.scheduler.radix_tree import Lease, RadixTree
from services.scheduler.request import Request
from services.scheduler.seats import Seats
from services.scheduler.worker import Worker
from shared import ints
from shared.clock import Clock
from shared.messages.kv import KvCancel, KvDone, KvLoad, KvReady, KvReceive, KvSend

log = structlog.get_logger(__name__)

MAX_TRANSFERS = 8
"""Of one worker, in and out together; its thread works on them one after the other."""
PATIENCE = 5.0
"""A transfer that takes so many times what it should is given up."""
MIN_DEADLINE_S = 1.0
SILENCE_S = 30.0
"""A worker that does not even answer that a transfer is cancelled is lost."""


@dataclass(slots=True, eq=False)
class Transfer:
    transfer_id: int
    source: Worker
    target: Worker
    namespace: bytes
    prefix: bytes  # all tokens from position 0 to the end of the last page that moves
    source_lease: Lease
    target_lease: Lease
    pages: list[int]  # of the target
    started: float
    deadline: float
    tier: Literal["", "host", "disk"] = ""  # of the target itself, where they come from
    requests: list[Request] = field(default_factory=list)  # that wait for it
    sending: bool = False  # the source was told and is not through
    after_step: int = -1  # of the target: until then its steps may use the pages
    told: bool = False  # the target has its order
    receiving: bool = True  # the target is not through
    arrived: bool = False  # the pages are in the tree
    failed: str = ""  # why it is given up


class Migration:
    """`give_up(request)` is called for each request of a failed transfer before it is placed anew.

    `spoilt(worker, tier, reason)` is called where a tier could not give back what it should have.
    """

    def __init__(
        self,
        tree: RadixTree,
        seats: Seats,
        fleet: Fleet,
        metrics: Metrics,
        clock: Clock,
        timeout: float,
        give_up: Callable[[Request], None],
        spoilt: Callable[[Worker, str, str], None],
        shortest: float = MIN_DEADLINE_S,
    ) -> None:
        self.transfers: dict[int, Transfer] = {}
        self.rates = Rates()
        self._tree = tree
        self._seats = seats
        self._fleet = fleet
        self._metrics = metrics
        self._clock = clock
        self._timeout = timeout
        self._give_up = give_up
        self._spoilt = spoilt
        self._shortest = shortest

    @property
    def workers(self) -> Iterable[Worker]:
        return self._fleet

    @property
    def possible(self) -> bool:
        """Whether there are two workers that could move pages, or one that could bring some back."""
        if not self._tree.enabled:
            return False
        movers = sum(bool(worker.hello.kv_endpoints) for worker in self._fleet)
        return movers > 1 or any(worker.tiers for worker in self._fleet)

    def seconds(self, source: Worker, target: Worker, num_pages: int, tier: str = "") -> float:
        """How long so many pages would take, behind what both are moving already."""
        ahead = max(self._pages_under_way(source), self._pages_under_way(target))
        return self.rates.move_seconds((ahead + num_pages) * target.hello.kv_bytes_per_page, tier)

    def under_way(self, target: Worker, namespace: bytes, tokens: bytes) -> Transfer | None:
        """The one that brings most of `tokens` there."""
        found = [
            transfer
            for transfer in (self.transfers[number] for number in target.transfers)
            if transfer.target is target
            and transfer.receiving
            and not transfer.failed
            and transfer.namespace == namespace
            and tokens.startswith(transfer.prefix)
        ]
        return max(found, key=lambda transfer: len(transfer.prefix), default=None)

    def wait_for(self, transfer: Transfer, request: Request) -> None:
        transfer.requests.append(request)
        request.transfer = transfer

    def start(self, request: Request, source: Source, target: Worker) -> bool:
        """Have the pages of the request's prefix moved; it waits for them. False where there is no room."""
        if max(len(source.worker.transfers), len(target.transfers)) >= MAX_TRANSFERS:
            return False
        transfer = self._prepare(request, source, target)
        if transfer is None:
            return False
        self.transfers[transfer.transfer_id] = transfer
        source.worker.transfers.add(transfer.transfer_id)
        target.transfers.add(transfer.transfer_id)
        target.quarantine[transfer.transfer_id] = transfer.pages
        self.wait_for(transfer, request)
        transfer.after_step = target.next_step_id - 1
        self._metrics.count("transfers")
        self._tell_target(transfer)
        return True

    def stepped(self, worker: Worker) -> None:
        """The result of a step is in."""
        for number in list(worker.transfers):
            transfer = self.transfers.get(number)
            if transfer is not None and transfer.target is worker:
                self._tell_target(transfer)

    def _tell_target(self, transfer: Transfer) -> None:
        """Pages come beside the steps: only when those are done that were dispatched before the pages were free."""
        if not transfer.told and transfer.receiving and transfer.target.settled_step >= transfer.after_step:
            transfer.told = True
            self._fleet.send(transfer.target, self._first_order(transfer))

    def _first_order(self, transfer: Transfer) -> KvReceive | KvLoad:
        number, pages = transfer.transfer_id, ints.pack(transfer.pages)
        if not transfer.tier:
            return KvReceive(number, pages, transfer.source.worker_id)
        return KvLoad(number, transfer.tier, ints.pack(_their_pages(transfer)), pages)

    def _prepare(self, request: Request, source: Source, target: Worker) -> Transfer | None:
        tree = self._tree
        prefix = request.tokens(0, source.pages * tree.page_size)
        here = self._lease(request.namespace, prefix, target.key)
        missing = source.pages - here.num_pages
        pages = self._seats.take_pages(target, missing) if missing > 0 else None
        if pages is None:
            tree.release(here)
            return None
        there = self._lease(request.namespace, prefix, source.key)
        if there.num_pages < source.pages:
            target.pool.release(pages)
            tree.release(there)
            tree.release(here)
            return None
        now = self._clock.now()
        expected = self.seconds(source.worker, target, missing, source.tier)
        deadline = now + min(self._timeout, max(self._shortest, PATIENCE * expected))
        number = secrets.randbits(62)  # not to be guessed by whoever can reach a worker's socket
        return Transfer(
            number, source.worker, target, request.namespace, prefix, there, here, pages, now, deadline, source.tier
        )

    def _lease(self, namespace: bytes, prefix: bytes, key: str) -> Lease:
        lease = self._tree.acquire(self._tree.match(namespace, prefix), key)
        self._tree.forget_copy(lease)
        return lease

    # What workers say

    def ready(self, worker: Worker, message: KvReady) -> None:
        transfer = self.transfers.get(message.transfer_id)
        if transfer is None or transfer.target is not worker or transfer.failed or transfer.sending or transfer.tier:
            return
        transfer.sending = True
        pages = ints.pack(_their_pages(transfer))
        order = KvSend(transfer.transfer_id, pages, worker.worker_id, worker.hello.kv_endpoints)
        self._fleet.send(transfer.source, order)

    def done(self, worker: Worker, message: KvDone) -> None:
        transfer = self.transfers.get(message.transfer_id)
        if transfer is None:
            return
        if message.side == "sent" and transfer.source is worker and transfer.sending:
            transfer.sending = False
            self._tree.release(transfer.source_lease)
        elif message.side == "received" and transfer.target is worker and transfer.receiving:
            transfer.receiving = False
            self._take_out_of_quarantine(transfer, arrived=message.ok and not transfer.failed)
        if not message.ok:
            if transfer.tier and not transfer.failed:
                self._spoilt(worker, transfer.tier, message.detail)
            self.fail(transfer, f"{message.side}: {message.detail}")
        self._forget_if_over(transfer)

    def _take_out_of_quarantine(self, transfer: Transfer, *, arrived: bool) -> None:
        target, lease = transfer.target, transfer.target_lease
        pages = target.quarantine.pop(transfer.transfer_id)
        if arrived:
            transfer.arrived = True
            pages = self._tree.extend(lease, transfer.prefix[4 * lease.num_tokens :], pages)
            self._count(transfer)
            self._let_requests_go(transfer)
        target.pool.release(pages)
        self._tree.release(lease)

    def _count(self, transfer: Transfer) -> None:
        pages = len(transfer.pages)
        num_bytes = pages * transfer.target.hello.kv_bytes_per_page
        transfer.target.pages_in += pages
        self.rates.moved(num_bytes, self._clock.now() - transfer.started, transfer.tier)
        if transfer.tier:
            self._metrics.count(f"{transfer.tier}_reloaded_tokens", pages * self._tree.page_size)
            return
        transfer.source.pages_out += pages
        self._metrics.count("transferred_tokens", pages * self._tree.page_size)
        self._metrics.count("transferred_bytes", num_bytes)

    # Failures

    def fail(self, transfer: Transfer, reason: str) -> None:
        """Whoever waits computes; whoever is not through is told and keeps its pages until it answers."""
        if transfer.failed or transfer.arrived:
            return
        log.info("transfer failed", source=transfer.source.key, target=transfer.target.key, reason=reason)
        transfer.failed = reason
        self._metrics.count("transfers_failed")
        for request in transfer.requests:
            request.failed_transfers += 1
            if request.transfer is transfer and request.live:
                self._give_up(request)
        self._let_requests_go(transfer)
        cancel = KvCancel(transfer.transfer_id)
        if not transfer.sending:
            self._tree.release(transfer.source_lease)
        elif transfer.source in self._fleet:
            self._fleet.send(transfer.source, cancel)
        if transfer.receiving and not transfer.told:
            transfer.receiving = False
            self._take_out_of_quarantine(transfer, arrived=False)
        elif transfer.receiving and transfer.target in self._fleet:
            self._fleet.send(transfer.target, cancel)

    def cancel_all(self, reason: str, key: str = "") -> None:
        """All, or those from the tier that the tree knows as `key`."""
        for transfer in list(self.transfers.values()):
            if key in ("", transfer.source_lease.worker):
                self.fail(transfer, reason)
                self._forget_if_over(transfer)

    def check_deadlines(self) -> None:
        now = self._clock.now()
        for transfer in list(self.transfers.values()):
            if now >= transfer.deadline:
                self.fail(transfer, f"not done after {now - transfer.started:.1f} s")
            if now >= transfer.deadline + SILENCE_S:
                silent = transfer.target if transfer.receiving else transfer.source
                self._fleet.drop(silent, "does not answer about a transfer")
            self._forget_if_over(transfer)

    def lose_worker(self, worker: Worker) -> None:
        """The tree has dropped it: what it held or awaited is gone with it."""
        for number in list(worker.transfers):
            transfer = self.transfers.get(number)
            if transfer is None:
                continue
            if transfer.source is worker:
                transfer.sending = False
            if transfer.target is worker:
                transfer.receiving = False
            self.fail(transfer, f"{worker.key} is gone")
            self._forget_if_over(transfer)

    def _let_requests_go(self, transfer: Transfer) -> None:
        for request in transfer.requests:
            if request.transfer is transfer:
                request.transfer = request.placement = None
        transfer.requests = []

    def _forget_if_over(self, transfer: Transfer) -> None:
        if transfer.receiving or transfer.sending:
            return
        self._tree.release(transfer.source_lease)
        self._tree.release(transfer.target_lease)
        for worker in (transfer.source, transfer.target):
            worker.transfers.discard(transfer.transfer_id)
        self.transfers.pop(transfer.transfer_id, None)

    def _pages_under_way(self, worker: Worker) -> int:
        return sum(len(self.transfers[number].pages) for number in worker.transfers)


def _their_pages(transfer: Transfer) -> array[int]:
    """The source's pages that the target lacks."""
    held = transfer.target_lease.num_pages
    return transfer.source_lease.pages[held : held + len(transfer.pages)]
