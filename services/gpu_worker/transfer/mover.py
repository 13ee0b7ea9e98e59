"""The thread that moves pages in and out, one chunk of each per turn. Leaves the word of the scheduler to `transfers`.

event loop --orders, a byte in a pipe--> thread: poll(PULL, pipe, PUSH sockets that are full)
           <----- call_soon_threadsafe(finished)

With a carrier pages go by NIXL to targets that have one too: by the sockets go offers and answers alone. NIXL wakes
nobody, so while something is under way the thread looks again after WAIT_MS.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec
import structlog
import zmq

from services.gpu_worker.transfer.answers import Answers
from services.gpu_worker.transfer.carrier import Carrier
from services.gpu_worker.transfer.incoming import BadChunk, Incoming
from services.gpu_worker.transfer.offers import Offers
from services.gpu_worker.transfer.outgoing import (
    CHUNK_BYTES,
    QUEUED_CHUNKS,
    Outgoing,
    Sockets,
    send_chunk,
    takes_now,
)
from services.gpu_worker.transfer.page_io import PageIO
from services.gpu_worker.transfer.reads import Reads, Step, let_go, refuse
from shared import curve
from shared.messages.edges import WorkerToWorker
from shared.messages.kv import KvChunk, KvOffer, KvTaken

log = structlog.get_logger(__name__)

HEADER_BYTES = 4096
WAIT_MS = 1
PAUSE_S = 0.1
"""After a failure, so that one that comes again and again takes neither a core nor the log."""
_CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Finished:
    """How one side of a transfer ended."""

    transfer_id: int
    side: Literal["sent", "received"]
    num_pages: int = 0
    error: str = ""  # empty: it went well


class Mover:
    """Raises zmq.ZMQError where `endpoint` cannot be bound. `on_finished` is called in the event loop."""

    def __init__(
        self, pages: PageIO, endpoint: str, on_finished: Callable[[Finished], None], carrier: Carrier | None = None
    ) -> None:
        self.page_bytes = pages.page_bytes
        self._pages = pages
        self._on_finished = on_finished
        self._loop = asyncio.get_running_loop()
        self.incoming = Incoming(pages)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self._pull = context.socket(zmq.PULL)
        self._pull.setsockopt(zmq.RCVHWM, QUEUED_CHUNKS)
        self._pull.setsockopt(zmq.LINGER, 0)
        self._pull.setsockopt(zmq.MAXMSGSIZE, max(CHUNK_BYTES, pages.page_bytes) + HEADER_BYTES)
        try:
            curve.secure_server(self._pull, endpoint, context, "pages", ("worker",))
            self._pull.bind(endpoint)
        except zmq.ZMQError:
            self._pull.close()
            raise
        self.endpoint = self._pull.getsockopt_string(zmq.LAST_ENDPOINT)
        self._decoder = msgspec.msgpack.Decoder(WorkerToWorker)
        self.carrier = carrier
        self.offers = None if carrier is None else Offers(carrier, pages, self.endpoint)
        self.reads = None if carrier is None else Reads(carrier, pages, self.incoming)
        self._sockets = Sockets(context)
        self._answers = Answers(self._sockets)
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outgoing: deque[Outgoing] = deque()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._running = True
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name="kv-transfer", daemon=True)
        self._thread.start()

    # Called in the event loop

    def send(self, transfer_id: int, pages: list[int], endpoint: str, *, nixl: bool = False) -> None:
        """`nixl`: whether the target takes offers."""
        self._order(lambda: self._begin(Outgoing(transfer_id, pages, endpoint, nixl)))

    def forget(self, transfer_id: int | None = None) -> None:
        """Send no more of it, or of anything."""
        self._order(lambda: self._forget(transfer_id))

    def close(self) -> None:
        """End the thread; a chunk in work is finished first."""
        self.incoming.cancel_all()
        self._order(self._stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def _order(self, order: Callable[[], None]) -> None:
        self._orders.put(order)
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self._wake_write, b"w")

    # Everything below runs in the thread

    def _run(self) -> None:
        while self._running:
            try:
                self._move()
            except Exception as error:  # nobody watches this thread, and the scheduler waits for what it does
                self._fail(error)
        self._end()

    def _move(self) -> None:
        """Until the end."""
        poller = zmq.Poller()
        poller.register(self._pull, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        full: set[zmq.Socket[bytes]] = set()  # whose targets have yet to take what they were sent
        moved = True  # something may wait already, after a failure
        self._obey()
        if self.carrier is not None:
            self.carrier.enter_thread()
        while self._running:
            for socket, _ in poller.poll(0 if moved else self._patience()):
                if socket is self._pull:
                    self._receive()
                elif socket == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
            for socket in full:
                poller.unregister(socket)
            self._obey()
            self._turn()
            moved, full = self._send_one()
            full |= self._answers.send()
            if not moved:  # else nobody has asked who waits
                self._sockets.trim(full)
            for socket in full:
                poller.register(socket, zmq.POLLOUT)

    def _fail(self, error: Exception) -> None:
        """Of something unforeseen: all that is under way fails, what comes next may go well."""
        log.exception("transfers failed")
        why = f"{type(error).__name__}: {error}"
        for transfer_id in self.incoming.cancel_all():
            self._finish(Finished(transfer_id, "received", error=why))
        for outgoing in list(self._outgoing):
            self._drop(outgoing)
            self._finish(Finished(outgoing.transfer_id, "sent", error=why))
        for step in self.reads.give_up() if self.reads is not None else ():
            self._answers.add(step.answer_to, step.answer)
        time.sleep(PAUSE_S)

    def _patience(self) -> int | None:
        """How long, in ms, nothing may happen until something has to be looked at; None: for ever."""
        reads = self.reads is not None and self.reads.active
        return WAIT_MS if reads or any(outgoing.offered for outgoing in self._outgoing) else None

    def _obey(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._orders.get_nowait()()

    def _stop(self) -> None:
        self._running = False

    def _end(self) -> None:
        self._pull.close()
        self._sockets.close()
        if self.reads is not None:
            self.reads.close()
        if self.carrier is not None:
            self.carrier.close()

    def _begin(self, outgoing: Outgoing) -> None:
        if self.offers is None or not self.offers.are_for(outgoing.endpoint):
            outgoing.by_nixl = False
        self._outgoing.append(outgoing)

    def _forget(self, transfer_id: int | None) -> None:
        for outgoing in list(self._outgoing):
            if transfer_id in (None, outgoing.transfer_id):
                self._drop(outgoing)

    def _drop(self, outgoing: Outgoing) -> None:
        self._outgoing.remove(outgoing)
        if self.offers is not None:
            self.offers.forget(outgoing)

    def _send_one(self) -> tuple[bool, set[zmq.Socket[bytes]]]:
        """One chunk of the oldest transfer that can go on; where none can, the sockets to wait for."""
        full: set[zmq.Socket[bytes]] = set()
        for outgoing in list(self._outgoing) if self._running else ():
            if outgoing.is_sent or (outgoing.by_nixl and self.offers is not None and not self.offers.has_room()):
                continue  # what is on its way has to be answered first
            try:
                socket = self._sockets.to(outgoing.endpoint)
                if socket in full or not self._send_chunk(outgoing, socket):
                    full.add(socket)
                    continue
            except (zmq.ZMQError, curve.KeysUnusable, IndexError, RuntimeError) as error:
                self._drop(outgoing)
                self._finish(Finished(outgoing.transfer_id, "sent", error=str(error) or type(error).__name__))
            return True, set()
        return False, full

    def _send_chunk(self, outgoing: Outgoing, socket: zmq.Socket[bytes]) -> bool:
        """False: the target does not take it now."""
        if not takes_now(socket):
            return False
        if outgoing.by_nixl and self.offers is not None:
            return self.offers.make(outgoing, socket)
        if not send_chunk(outgoing, socket, self._pages):
            return False
        self._finish_sent(outgoing)
        return True

    def _finish_sent(self, outgoing: Outgoing) -> None:
        if outgoing.is_sent and not outgoing.offered:
            self._outgoing.remove(outgoing)
            self._finish(Finished(outgoing.transfer_id, "sent", outgoing.sent))

    def _receive(self) -> None:
        frames = [frame.buffer for frame in self._pull.recv_multipart(copy=False)]
        try:
            message = self._decode(frames)
            match message:
                case KvChunk():
                    self._received(self.incoming.take(message, frames[1]))
                case KvOffer():
                    self._on_offer(message, bytes(frames[1]))
                case KvTaken():
                    self._on_taken(message)
                case None:
                    self.incoming.dropped += 1
        except BadChunk as error:
            self._spoilt(error)

    def _decode(self, frames: list[memoryview]) -> WorkerToWorker | None:
        try:
            message = self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return message if len(frames) == (1 if isinstance(message, KvTaken) else 2) else None

    def _on_offer(self, offer: KvOffer, metadata: bytes) -> None:
        if self.reads is None:
            self._conclude(refuse(self.incoming, offer, "no NIXL here"))
            return
        try:
            if self.reads.take(offer, metadata):
                return
            self.incoming.dropped += 1
        except BadChunk as error:
            self._spoilt(error)
        self._conclude(let_go(offer))

    def _on_taken(self, taken: KvTaken) -> None:
        outgoing = next((o for o in self._outgoing if o.transfer_id == taken.transfer_id), None)
        if outgoing is None or self.offers is None or not self.offers.answered(outgoing, taken):
            return  # the answer to what was cancelled, or to what goes by the socket by now
        if not taken.ok:
            log.warning("nixl: sending by the socket", transfer_id=taken.transfer_id, reason=taken.detail)
        self._finish_sent(outgoing)

    def _turn(self) -> None:
        """What NIXL has to be asked for."""
        if self.reads is not None and self.reads.active:
            for step in self.reads.turn():
                self._conclude(step)
        offering = [outgoing for outgoing in self._outgoing if outgoing.offered]
        if offering and self.carrier is not None:
            self.carrier.help_others()
        for outgoing in offering:
            if Offers.overdue(outgoing):
                self._drop(outgoing)
                self._finish(Finished(outgoing.transfer_id, "sent", error="what was offered is not answered"))

    def _conclude(self, step: Step) -> None:
        self._answers.add(step.answer_to, step.answer)
        if step.spoilt is not None:
            self._spoilt(step.spoilt)
        self._received(step.done)

    def _received(self, done: tuple[int, int] | None) -> None:
        if done is not None:
            self._finish(Finished(done[0], "received", done[1]))

    def _spoilt(self, error: BadChunk) -> None:
        log.warning("transfer spoilt", transfer_id=error.transfer_id, reason=str(error))
        if self.incoming.cancel(error.transfer_id):
            self._finish(Finished(error.transfer_id, "received", error=str(error)))

    def _finish(self, finished: Finished) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._on_finished, finished)
