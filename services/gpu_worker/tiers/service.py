"""What the scheduler orders of the tiers. Leaves host memory and files to `host` and `disk`.

KvStore  begins in the compute thread, in its place among the steps: the pages are read before they are written again;
         in the thread of the tiers they are waited for and kept, in the order of the commands
KvLoad   in the thread of the tiers, beside the steps: writes pages that no step knows yet
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Callable
from itertools import count, islice

import structlog

from services.gpu_worker.compute import ComputeThread
from services.gpu_worker.tiers.disk import DiskTier
from services.gpu_worker.tiers.host import HostTier
from services.gpu_worker.transfer.page_io import Bytes, PageIO, PendingRead
from shared import ints
from shared.messages.kv import KvDone, KvInventory, KvLoad, KvStore, KvStored

log = structlog.get_logger(__name__)

ENTRIES_AT_ONCE = 4096
_CLOSE_S = 2.0
_FIRST, _LATER, _LAST = 0, 1, 2
"""Somebody waits for a load, nobody for what is written to disk."""

Reply = Callable[[KvDone | KvStored | KvInventory], object]


class TierService:
    """One life of the worker after the other. Every order of a life is answered in it."""

    def __init__(
        self, pages: PageIO, compute: ComputeThread, host: HostTier | None, disk: DiskTier | None, reply: Reply
    ) -> None:
        self._pages = pages
        self._compute = compute
        self._host = host
        self._disk = disk
        self._reply = reply
        self._incarnation = 0
        self._life = 0  # what belongs to another one is dropped
        self._loading: set[int] = set()
        self._lock = threading.Lock()  # held while a load writes pages
        self._jobs: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._numbers = count()
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="kv-tiers", daemon=True)
        self._thread.start()

    # Called in the event loop

    def begin(self, incarnation: int) -> None:
        """A life begins: what the disk holds from earlier ones is told."""
        self._incarnation = incarnation
        life = self._life
        if self._disk is not None:
            self._put(_FIRST, lambda: self._tell_inventory(life))

    def end(self) -> None:
        """No page of the device is written any more once this has returned."""
        with self._lock:
            self._life += 1
            self._loading.clear()

    def close(self) -> None:
        self.end()
        self._put(_LAST, None)
        self._thread.join(_CLOSE_S)

    def store(self, order: KvStore) -> None:
        life = self._life
        self._compute.submit(lambda: self._store(order, life))

    def load(self, order: KvLoad) -> None:
        life = self._life
        self._loading.add(order.transfer_id)
        self._put(_FIRST, lambda: self._load(order, life))

    def cancel(self, transfer_id: int) -> None:
        with self._lock:
            if transfer_id not in self._loading:
                return
            self._loading.discard(transfer_id)
        self._reply(KvDone(transfer_id, self._incarnation, "received", ok=False, detail="cancelled"))

    # In the compute thread

    def _store(self, order: KvStore, life: int) -> None:
        if life != self._life:
            return
        reading: PendingRead | None = None
        try:
            if order.source == "device":
                reading = self._pages.start_read(ints.unpack(order.pages).tolist())
        except Exception as error:
            self._stored(order, life, error)
        else:
            self._put(_FIRST, lambda: self._keep(order, reading, life))

    def _stored(self, order: KvStore, life: int, error: Exception | None = None) -> None:
        if error is not None:
            log.warning("pages could not be kept", tier=order.tier, error=str(error))
        self._compute.post(
            self._answer,
            life,
            KvStored(order.order_id, self._incarnation, order.tier, ok=error is None, detail=str(error or "")),
        )

    # In the thread of the tiers

    def _run(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            job()

    def _put(self, priority: int, job: Callable[[], None] | None) -> None:
        self._jobs.put((priority, next(self._numbers), job))

    def _keep(self, order: KvStore, reading: PendingRead | None, life: int) -> None:
        if life != self._life:
            return
        try:
            slots = ints.unpack(order.slots).tolist()
            data = reading.result() if reading is not None else self._host_tier().get(ints.unpack(order.pages).tolist())
            if data.shape[1] != len(slots):
                raise IndexError(f"{data.shape[1]} pages for {len(slots)} slots")
            if order.tier == "disk":
                self._put(_LATER, lambda: self._write_files(order, slots, data, life))
                return
            self._host_tier().put(slots, data)
        except Exception as error:
            self._stored(order, life, error)
        else:
            self._stored(order, life)

    def _host_tier(self) -> HostTier:
        if self._host is None:
            raise IndexError("there is no host tier")
        return self._host

    def _write_files(self, order: KvStore, slots: list[int], data: Bytes, life: int) -> None:
        try:
            if self._disk is None:
                raise IndexError("there is no disk tier")
            size = len(order.tokens) // len(slots)
            parents = ints.unpack(order.parents)
            for index, (slot, parent) in enumerate(zip(slots, parents, strict=True)):
                tokens = order.tokens[index * size : (index + 1) * size]
                self._disk.put(slot, parent, order.namespace, tokens, data[:, index])
        except Exception as error:
            self._stored(order, life, error)
        else:
            self._stored(order, life)

    def _load(self, order: KvLoad, life: int) -> None:
        error = ""
        try:
            self._bring_back(order, life)
        except Exception as problem:
            error = str(problem) or type(problem).__name__
        self._compute.post(self._loaded, life, order.transfer_id, error)

    def _bring_back(self, order: KvLoad, life: int) -> None:
        slots, pages = ints.unpack(order.slots).tolist(), ints.unpack(order.pages).tolist()
        if order.tier == "host":
            pieces: list[tuple[list[int], bytes | Bytes]] = [(pages, self._host_tier().get(slots))]
        else:
            if self._disk is None:
                raise IndexError("there is no disk tier")
            pieces = [([page], self._disk.get(slot)) for page, slot in zip(pages, slots, strict=True)]
        for targets, data in pieces:
            with self._lock:
                if life == self._life and order.transfer_id in self._loading:
                    self._pages.write(targets, data)

    def _tell_inventory(self, life: int) -> None:
        if self._disk is None or life != self._life:
            return
        found = self._disk.entries()
        while entries := tuple(islice(found, ENTRIES_AT_ONCE)):
            self._compute.post(self._answer, life, KvInventory(self._incarnation, entries, last=False))
        self._compute.post(self._answer, life, KvInventory(self._incarnation, (), last=True))

    # Back in the event loop

    def _loaded(self, life: int, transfer_id: int, error: str) -> None:
        if life == self._life and transfer_id in self._loading:
            self._loading.discard(transfer_id)
            self._reply(KvDone(transfer_id, self._incarnation, "received", ok=not error, detail=error))

    def _answer(self, life: int, message: KvStored | KvInventory) -> None:
        if life == self._life:
            self._reply(message)
