"""What the scheduler says about transfers, and what it is told. Leaves the bytes to the mover's thread.

KvReceive -> pages are awaited -> KvReady       KvSend -> pages leave -> KvDone(sent)
             all are in -> KvDone(received)     KvCancel -> no page is written any more -> KvDone(not ok)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import structlog
import zmq

from services.gpu_worker.transfer.carrier import SCHEME, Carrier
from services.gpu_worker.transfer.mover import Finished, Mover
from services.gpu_worker.transfer.page_io import PageIO
from shared import ints
from shared.messages.kv import KvCancel, KvDone, KvReady, KvReceive, KvSend

log = structlog.get_logger(__name__)

Side = Literal["sent", "received"]
Reply = Callable[[KvReady | KvDone], object]


class Transfers:
    """One life of the worker after the other; each side of each transfer is answered by one KvDone in its life.

    Without an endpoint everything is refused: whoever asks must not wait for an answer.
    """

    def __init__(self, pages: PageIO | None, endpoint: str, reply: Reply, carrier: Carrier | None = None) -> None:
        self._reply = reply
        self._incarnation = 0
        self._sending: set[int] = set()
        self._receiving: set[int] = set()
        self._totals = {"kv_pages_in": 0, "kv_pages_out": 0}
        self._mover: Mover | None = None
        if pages is not None and endpoint:
            try:
                self._mover = Mover(pages, endpoint, self._finished, carrier)
            except zmq.ZMQError as error:
                log.warning("no transfers: the endpoint cannot be bound", endpoint=endpoint, reason=str(error))

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Where others send pages to, and what they may offer them to; none: nowhere."""
        if self._mover is None:
            return ()
        carrier = self._mover.carrier
        return (self._mover.endpoint,) if carrier is None else (self._mover.endpoint, SCHEME + carrier.name)

    def begin(self, incarnation: int) -> None:
        """A life begins; `end` was called for the one before."""
        self._incarnation = incarnation

    def end(self) -> None:
        """Once this has returned nothing writes a page, what is still read goes nowhere, and nothing is answered."""
        self._sending.clear()
        self._receiving.clear()
        if self._mover is not None:
            self._mover.incoming.cancel_all()
            self._mover.forget()

    def close(self) -> None:
        if self._mover is not None:
            self._mover.close()

    def handle(self, message: KvSend | KvReceive | KvCancel) -> None:
        match message:
            case KvReceive():
                self._receive(message)
            case KvSend():
                self._send(message)
            case KvCancel():
                self._cancel(message.transfer_id)

    def gauges(self) -> dict[str, float]:
        gauges = {name: float(value) for name, value in self._totals.items()}
        gauges["kv_dropped"] = float(self._mover.incoming.dropped) if self._mover is not None else 0.0
        if self._mover is not None and self._mover.reads is not None and self._mover.offers is not None:
            gauges["kv_nixl_pages_in"] = float(self._mover.reads.pages_read)
            gauges["kv_nixl_failed"] = float(self._mover.reads.failed + self._mover.offers.failed)
        return gauges

    def _receive(self, order: KvReceive) -> None:
        if self._mover is None:
            self._answer(order.transfer_id, "received", "this worker has no transfers")
            return
        self._receiving.add(order.transfer_id)
        self._mover.incoming.expect(order.transfer_id, ints.unpack(order.pages).tolist())
        self._reply(KvReady(order.transfer_id, self._incarnation))

    def _send(self, order: KvSend) -> None:
        if self._mover is None or not order.target_endpoints:
            self._answer(order.transfer_id, "sent", "no transfers between these workers")
            return
        self._sending.add(order.transfer_id)
        endpoint, *more = order.target_endpoints
        takes_offers = any(other.startswith(SCHEME) for other in more)
        self._mover.send(order.transfer_id, ints.unpack(order.pages).tolist(), endpoint, nixl=takes_offers)

    def _cancel(self, transfer_id: int) -> None:
        if self._mover is None:
            return
        if transfer_id in self._receiving and self._mover.incoming.cancel(transfer_id):
            self._receiving.discard(transfer_id)
            self._answer(transfer_id, "received", "cancelled")
        if transfer_id in self._sending:
            self._mover.forget(transfer_id)
            self._sending.discard(transfer_id)
            self._answer(transfer_id, "sent", "cancelled")

    def _finished(self, finished: Finished) -> None:
        """News from the thread; of a former life, or of what was cancelled meanwhile, they mean nothing."""
        under_way = self._sending if finished.side == "sent" else self._receiving
        if finished.transfer_id not in under_way:
            return
        under_way.discard(finished.transfer_id)
        self._totals["kv_pages_out" if finished.side == "sent" else "kv_pages_in"] += finished.num_pages
        self._answer(finished.transfer_id, finished.side, finished.error)

    def _answer(self, transfer_id: int, side: Side, error: str) -> None:
        self._reply(KvDone(transfer_id, self._incarnation, side, ok=not error, detail=error))
