"""Typed ZeroMQ sockets on asyncio: one ROUTER (Server) and one DEALER (Client), nothing dropped in silence.

Leaves to its users what a message means. ZeroMQ's file descriptor is edge-triggered, so after every
event *and every send* the socket's state is looked at again; all of that is in `_Socket` and nowhere else.

    bytes on the wire:  [identity] [msgspec message] [frame] [frame] ...

A frame above MAX_MESSAGE_BYTES breaks its connection inside ZeroMQ; a message above it, or of too many frames, is
dropped and counted here. Leaves keys to `curve`.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import msgspec
import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from shared import curve

T = TypeVar("T")
Frames = list[bytes]
Frame = bytes | memoryview  # of bytes

log = structlog.get_logger(__name__)

MAX_MESSAGE_BYTES = 64 << 20
MAX_FRAMES = 1024
ZERO_COPY_BYTES = 64 << 10
HIGH_WATER_MARK = 4096
HEARTBEAT_INTERVAL_MS = 500
HEARTBEAT_TIMEOUT_MS = 3000
RETRY_S = 0.05
_MAX_DRAIN = 256  # messages per turn of the event loop, so that one busy peer starves nobody

_encoder = msgspec.msgpack.Encoder()


class PeerGone(Exception):
    """No connection with that identity exists (any more)."""


class PeerBusy(Exception):
    """The peer's queue is at its high-water mark: it is dead, frozen, or credits were ignored."""


class _Socket(abc.ABC, Generic[T]):
    """What Server and Client share: the drain of an edge-triggered socket and its monitor."""

    def __init__(self, kind: int, receive: Any, context: zmq.Context[zmq.Socket[bytes]] | None) -> None:
        self._context = context or zmq.Context.instance()
        self._socket = self._context.socket(kind)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(receive)
        self._loop = asyncio.get_running_loop()
        self._monitor: zmq.Socket[bytes] | None = None
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._closed = False
        self._drain_scheduled = False
        self.malformed = 0
        self.on_writable: Callable[[], None] | None = None  # called a while after a send met a full queue
        self._retry: asyncio.TimerHandle | None = None
        for option, value in (
            (zmq.LINGER, 1000),
            (zmq.SNDHWM, HIGH_WATER_MARK),
            (zmq.RCVHWM, HIGH_WATER_MARK),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_INTERVAL_MS),
            (zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS),
        ):
            self._socket.setsockopt(option, value)

    def watch(self, on_disconnect: Callable[[], None]) -> None:
        """Call `on_disconnect` whenever any connection of this socket breaks."""
        monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._monitor = monitor

        def drain_monitor() -> None:
            while int(monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                recv_monitor_message(monitor, zmq.NOBLOCK)
                on_disconnect()

        self._loop.add_reader(int(monitor.getsockopt(zmq.FD)), drain_monitor)
        self._loop.call_soon(drain_monitor)

    def close(self) -> None:
        """Close at once; messages already sent get a second to leave."""
        if self._closed:
            return
        self._closed = True
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._fd)
        if self._monitor is not None:
            self._loop.remove_reader(int(self._monitor.getsockopt(zmq.FD)))
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close()

    def _start(self) -> None:
        self._loop.add_reader(self._fd, self._drain)
        self._schedule_drain()

    def _schedule_drain(self) -> None:
        if not self._drain_scheduled and not self._closed:
            self._drain_scheduled = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_scheduled = False
        if self._closed:
            return
        for _ in range(_MAX_DRAIN):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            if self._is_small(frames):
                self._deliver(frames)
            if self._closed:
                return
        else:
            self._schedule_drain()  # more is waiting, but others want a turn

    def _schedule_retry(self) -> None:
        # A ROUTER does not tell which peer has room again, so whoever met a full queue is asked to try later.
        if self._retry is None and self.on_writable is not None:
            self._retry = self._loop.call_later(RETRY_S, self._on_retry)

    def _on_retry(self) -> None:
        self._retry = None
        if not self._closed and self.on_writable is not None:
            self.on_writable()

    @abc.abstractmethod
    def _deliver(self, frames: Frames) -> None:
        """One message has arrived."""

    def _is_small(self, frames: Frames) -> bool:
        if len(frames) <= MAX_FRAMES and sum(map(len, frames)) <= MAX_MESSAGE_BYTES:
            return True
        self._drop(frames[0][:256], f"{len(frames)} frames of {sum(map(len, frames))} bytes")
        return False

    def _decode(self, data: bytes, sender: bytes) -> T | None:
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._drop(sender, str(error))
            return None

    def _drop(self, sender: bytes, why: str) -> None:
        self.malformed += 1
        if self.malformed in (1, 10, 100) or self.malformed % 1000 == 0:
            log.warning("malformed message dropped", sender=repr(sender), error=why, count=self.malformed)

    def _send(self, frames: list[Frame]) -> None:
        copy = sum(map(len, frames)) < ZERO_COPY_BYTES
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=copy)
        except zmq.Again as error:
            self._schedule_retry()
            raise PeerBusy from error
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerGone from error
            raise
        finally:
            self._schedule_drain()


class Server(_Socket[T]):
    """A bound ROUTER. `on_message(identity, message, frames)` is called for each valid message.

    `receive` is the union of messages this edge accepts; anything else is dropped and counted. `peers` are the kinds
    of keys that may connect over tcp; `edge` is what the log calls this door.
    """

    def __init__(
        self,
        endpoint: str,
        receive: Any,
        on_message: Callable[[bytes, T, Frames], None],
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        *,
        edge: str = "fleet",
        peers: Iterable[str] = curve.KINDS,
    ) -> None:
        super().__init__(zmq.ROUTER, receive, context)
        self._on_message = on_message
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        curve.secure_server(self._socket, endpoint, self._context, edge, peers)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._start()

    def send(self, identity: bytes, message: msgspec.Struct, *frames: Frame) -> None:
        """Queue for one peer. Raises PeerGone or PeerBusy; never waits, never drops."""
        self._send([identity, _encoder.encode(message), *frames])

    def _deliver(self, frames: Frames) -> None:
        if len(frames) < 2:
            self._drop(frames[0], "no message")
            return
        message = self._decode(frames[1], frames[0])
        if message is not None:
            self._on_message(frames[0], message, frames[2:])


class RawServer(_Socket[None]):
    """A bound ROUTER for frames in a protocol of others; `on_frames(identity, frames)` judges them itself."""

    def __init__(
        self,
        endpoint: str,
        on_frames: Callable[[bytes, Frames], None],
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        super().__init__(zmq.ROUTER, None, context)
        self._on_frames = on_frames
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.bind(endpoint)
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._start()

    def send_frames(self, identity: bytes, *frames: Frame) -> None:
        """Queue for one peer. Raises PeerGone or PeerBusy; never waits, never drops."""
        self._send([identity, *frames])

    def _deliver(self, frames: Frames) -> None:
        if len(frames) < 2:
            self._drop(frames[0], "no message")
        else:
            self._on_frames(frames[0], frames[1:])


class Client(_Socket[T]):
    """A DEALER connected to one Server. `on_message(message, frames)` is called for each valid message.

    `identity` must be new for every life of the owner: `id/incarnation`. `server` is the kind of key that proves, over
    tcp, that this is who was meant.
    """

    def __init__(
        self,
        endpoint: str,
        identity: str,
        receive: Any,
        on_message: Callable[[T, Frames], None],
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        *,
        server: str = "scheduler",
    ) -> None:
        super().__init__(zmq.DEALER, receive, context)
        self._on_message = on_message
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        curve.secure_client(self._socket, endpoint, server)
        self._socket.connect(endpoint)
        self.endpoint = endpoint
        self._start()

    def send(self, message: msgspec.Struct, *frames: Frame) -> None:
        """Queue for the server. Raises PeerBusy while not connected or full; never waits, never drops."""
        self._send([_encoder.encode(message), *frames])

    def try_send(self, message: msgspec.Struct, *frames: Frame) -> bool:
        """As `send`, for what may be lost: hellos and heartbeats."""
        with contextlib.suppress(PeerBusy):
            self.send(message, *frames)
            return True
        return False

    def _deliver(self, frames: Frames) -> None:
        message = self._decode(frames[0], b"server")
        if message is not None:
            self._on_message(message, frames[1:])
