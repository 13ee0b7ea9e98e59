"""Pages on their way out: one PUSH socket per target, one chunk at a time. Leaves the thread to the mover."""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field

import msgspec
import zmq

from services.gpu_worker.transfer.carrier import Slot
from services.gpu_worker.transfer.page_io import PageIO
from shared import curve
from shared.messages.kv import KvChunk

CHUNK_BYTES = 4 << 20
QUEUED_CHUNKS = 2  # at each end of a socket; beyond them the sender waits
MAX_TARGETS = 32

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Offered:
    """Pages that lie ready for the target."""

    first: int
    slot: Slot
    since: float


@dataclass(slots=True, eq=False)
class Outgoing:
    transfer_id: int
    pages: list[int]
    endpoint: str
    by_nixl: bool = False
    sent: int = 0  # pages, or offered
    offered: deque[Offered] = field(default_factory=deque)  # and not yet answered

    @property
    def is_sent(self) -> bool:
        return self.sent == len(self.pages)


class Sockets:
    """The targets of late; `trim` closes those not used for the longest time."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._context = context
        self._sockets: dict[str, zmq.Socket[bytes]] = {}

    def to(self, endpoint: str) -> zmq.Socket[bytes]:
        """Raises zmq.ZMQError for an endpoint that is none."""
        socket = self._sockets.pop(endpoint, None)
        if socket is None:
            socket = self._context.socket(zmq.PUSH)
            socket.setsockopt(zmq.SNDHWM, QUEUED_CHUNKS)
            socket.setsockopt(zmq.IMMEDIATE, 1)  # without a connection nothing is queued
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            curve.secure_client(socket, endpoint, "worker")
            socket.connect(endpoint)
        self._sockets[endpoint] = socket
        return socket

    def trim(self, waited_for: set[zmq.Socket[bytes]]) -> None:
        """Keep MAX_TARGETS, and all of `waited_for`: who opened those anew each turn would never see them connect."""
        excess = len(self._sockets) - MAX_TARGETS
        idle = [endpoint for endpoint, socket in self._sockets.items() if socket not in waited_for]
        for endpoint in idle[: max(excess, 0)]:
            self._sockets.pop(endpoint).close()

    def close(self) -> None:
        for socket in self._sockets.values():
            socket.close()
        self._sockets.clear()


def takes_now(socket: zmq.Socket[bytes]) -> bool:
    """Whether it is connected and its queue has room."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)


def send_chunk(outgoing: Outgoing, socket: zmq.Socket[bytes], pages: PageIO) -> bool:
    """The next pages, if the socket takes them now. False: nothing has happened."""
    count = min(max(1, CHUNK_BYTES // pages.page_bytes), len(outgoing.pages) - outgoing.sent)
    first = outgoing.sent
    data = pages.read(outgoing.pages[first : first + count]).reshape(-1).data
    last = first + count == len(outgoing.pages)
    header = KvChunk(outgoing.transfer_id, first, count, last, zlib.crc32(data), pages.format)
    try:
        socket.send_multipart([_encoder.encode(header), data], zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return False
    outgoing.sent += count
    return True
