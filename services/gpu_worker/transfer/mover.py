"""The thread that moves pages in and out, one chunk of each per turn. Leaves the word of the scheduler to `transfers`.

event loop --orders, a byte in a pipe--> thread: poll(PULL, pipe, PUSH sockets that are full)
           <----- call_soon_threadsafe(finished)
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import structlog
import zmq

from services.gpu_worker.transfer.incoming import BadChunk, Incoming
from services.gpu_worker.transfer.outgoing import CHUNK_BYTES, QUEUED_CHUNKS, Outgoing, Sockets, send_chunk
from services.gpu_worker.transfer.page_io import PageIO
from shared import curve

log = structlog.get_logger(__name__)

HEADER_BYTES = 4096
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

    def __init__(self, pages: PageIO, endpoint: str, on_finished: Callable[[Finished], None]) -> None:
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
        self._sockets = Sockets(context)
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

    def send(self, transfer_id: int, pages: list[int], endpoint: str) -> None:
        self._order(lambda: self._outgoing.append(Outgoing(transfer_id, pages, endpoint)))

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
        poller = zmq.Poller()
        poller.register(self._pull, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        full: set[zmq.Socket[bytes]] = set()  # whose targets have yet to take what they were sent
        while self._running:
            for socket, _ in poller.poll(0 if self._outgoing and not full else None):
                if socket is self._pull:
                    self._receive()
                elif socket == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
            for socket in full:
                poller.unregister(socket)
            self._obey()
            full = self._send_one()
            for socket in full:
                poller.register(socket, zmq.POLLOUT)
        self._pull.close()
        self._sockets.close()

    def _obey(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._orders.get_nowait()()

    def _stop(self) -> None:
        self._running = False

    def _forget(self, transfer_id: int | None) -> None:
        self._outgoing = deque(o for o in self._outgoing if transfer_id not in (None, o.transfer_id))

    def _send_one(self) -> set[zmq.Socket[bytes]]:
        """One chunk of the oldest transfer that can go on; where none can, the sockets to wait for."""
        full: set[zmq.Socket[bytes]] = set()
        for outgoing in list(self._outgoing) if self._running else ():
            try:
                socket = self._sockets.to(outgoing.endpoint)
                if socket in full or not self._send_chunk(outgoing, socket):
                    full.add(socket)
                    continue
            except (zmq.ZMQError, IndexError, RuntimeError) as error:
                self._outgoing.remove(outgoing)
                self._finish(Finished(outgoing.transfer_id, "sent", error=str(error) or type(error).__name__))
            return set()
        return full

    def _send_chunk(self, outgoing: Outgoing, socket: zmq.Socket[bytes]) -> bool:
        """False: the target does not take it now."""
        if not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT or not send_chunk(outgoing, socket, self._pages):
            return False
        if outgoing.sent == len(outgoing.pages):
            self._outgoing.remove(outgoing)
            self._finish(Finished(outgoing.transfer_id, "sent", outgoing.sent))
        return True

    def _receive(self) -> None:
        frames = [frame.buffer for frame in self._pull.recv_multipart(copy=False)]
        try:
            done = self.incoming.take(frames)
        except BadChunk as error:
            log.warning("transfer spoilt", transfer_id=error.transfer_id, reason=str(error))
            if self.incoming.cancel(error.transfer_id):
                self._finish(Finished(error.transfer_id, "received", error=str(error)))
            return
        if done is not None:
            self._finish(Finished(done[0], "received", done[1]))

    def _finish(self, finished: Finished) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_finished, finished)
