"""The life of one service process: event loop, signals, heartbeats, a parent that may vanish.

Leaves the work itself to a `Service`: `start()` once, `drain()` on the first SIGTERM or SIGINT, `close()` at the end.
A second signal ends the process at once. Whoever was started by the launcher inherits the read end of a
pipe (RADIXFLEET_PARENT_FD); its end of file means the parent is dead, however it died.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Protocol

import structlog
import uvloop

from shared import curve
from shared import logging as service_logging
from shared.config import ServiceConfig
from shared.messages.control import Ping, Pong
from shared.transport import Frames, PeerBusy, PeerGone, Server

log = structlog.get_logger(__name__)

PARENT_FD = "RADIXFLEET_PARENT_FD"
RUN_DIR = "RADIXFLEET_RUN_DIR"
READY_FD = "RADIXFLEET_READY_FD"
ALIVE_FD = "RADIXFLEET_ALIVE_FD"
ORPHAN_GRACE_S = 3.0

_orphaned = threading.Event()


class Service(Protocol):
    async def start(self) -> None:
        """Bind, connect, load; return when the service works."""
        ...

    async def drain(self) -> None:
        """Take nothing new, finish what runs; bounded by the service's own drain time-out."""
        ...

    async def close(self) -> None:
        """Release sockets, threads and files; called exactly once, also after a failed start."""
        ...

    def heartbeat(self) -> None:
        """Called every `heartbeat_interval` seconds from the event loop."""
        ...


def new_incarnation() -> int:
    """A number that grows with every life of a process on one machine."""
    return time.time_ns() // 1000


def new_service_id(name: str, config: ServiceConfig) -> str:
    """The configured id, or a short random one; `@host` stands for the name of this host, in containers theirs."""
    if config.service_id == "@host":
        return f"{name}-{socket.gethostname()}"
    return config.service_id or f"{name}-{uuid.uuid4().hex[:8]}"


def announce_ready() -> None:
    """Tell the launcher that this service does its work: the front door on its first ready status, a worker when
    it is welcome.

    Does nothing where no launcher listens, or again.
    """
    raw = os.environ.pop(READY_FD, None)
    if raw is not None:
        with contextlib.suppress(OSError):  # a launcher that is gone is noticed by its own pipe
            os.write(int(raw), b"r")
            os.close(int(raw))


class CannotStart(Exception):
    """What was asked for cannot be; the message is for whoever asked."""


def run(name: str, config: ServiceConfig, make: Callable[[], Service]) -> int:
    """Run one service until a signal ends it; returns the exit code."""
    service_logging.configure(name, config.log_level, config.log_format)
    _take_keys(name, config)
    watch_parent()
    try:
        return uvloop.run(_live(name, config, make))
    except KeyboardInterrupt:
        return 130
    finally:
        curve.close()
        _clear_run_dir()


def _take_keys(name: str, config: ServiceConfig) -> None:
    if config.curve_dir:
        try:
            curve.use(curve.load(config.curve_dir, name))
        except curve.KeysUnusable as error:
            raise SystemExit(f"radixfleet: {error}") from None


async def _live(name: str, config: ServiceConfig, make: Callable[[], Service]) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            log.warning("second signal: ending at once")
            _clear_run_dir()
            os._exit(1)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    service = make()
    beat: asyncio.Task[None] | None = None
    health: _Health | None = None
    try:
        starting = asyncio.ensure_future(service.start())
        stopping = asyncio.ensure_future(stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return 0
        await starting
        if config.health_bind:
            health = _Health(config.health_bind)
        beat = asyncio.create_task(_heartbeats(service, config.heartbeat_interval))
        await asyncio.wait({stopping, beat}, return_when=asyncio.FIRST_COMPLETED)
        if beat.done():
            await beat  # raises what broke it
        log.info("draining")
        await service.drain()
        return 0
    except CannotStart as error:
        log.error("cannot start", reason=str(error))
        return 1
    except Exception:
        log.exception("service failed")
        return 1
    finally:
        if beat is not None:
            beat.cancel()
        if health is not None:
            health.close()
        await service.close()


class _Health:
    """Answers `radixfleet ping` from the event loop, once the service has started: a stuck loop does not answer."""

    def __init__(self, endpoint: str) -> None:
        self._server: Server[Ping] = Server(endpoint, Ping, self._on_ping, edge="health")

    def _on_ping(self, identity: bytes, ping: Ping, frames: Frames) -> None:
        with contextlib.suppress(PeerGone, PeerBusy):  # whoever still wants to know asks again
            self._server.send(identity, Pong(ping.nonce))

    def close(self) -> None:
        self._server.close()


async def _heartbeats(service: Service, interval: float) -> None:
    alive = _alive_fd()
    while True:
        service.heartbeat()
        if alive is not None:
            with contextlib.suppress(OSError):  # full or broken: the launcher does not read, or is gone
                os.write(alive, b"a")
        await asyncio.sleep(interval)


def _alive_fd() -> int | None:
    """Where the launcher hears that the event loop still turns; one that is silent for long is replaced."""
    raw = os.environ.get(ALIVE_FD)
    if raw is None:
        return None
    os.set_blocking(int(raw), False)
    return int(raw)


def watch_parent() -> None:
    """End this process when whoever holds the other end of its pipe is gone; does nothing without a pipe."""
    raw = os.environ.get(PARENT_FD)
    if raw is None:
        return

    def wait_for_end_of_file() -> None:
        while os.read(int(raw), 1):
            pass
        _orphaned.set()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE_S)  # the grace the event loop has to end by itself; this thread only waits
        _clear_run_dir()
        os._exit(1)

    threading.Thread(target=wait_for_end_of_file, name="parent-watch", daemon=True).start()


def _clear_run_dir() -> None:
    """What a launcher would have removed, had it lived."""
    run_dir = os.environ.get(RUN_DIR)
    if run_dir and _orphaned.is_set():
        shutil.rmtree(run_dir, ignore_errors=True)
