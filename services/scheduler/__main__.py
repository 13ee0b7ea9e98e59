"""The scheduler service: three ROUTER sockets, the loop, signals. Leaves every decision to the scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from typing import Any

import structlog

from services.scheduler.core import Edges
from services.scheduler.kv_events import KvEvents
from services.scheduler.kv_publisher import KvPublisher
from services.scheduler.scheduler import Handler, Scheduler
from shared import curve, tenants
from shared.clock import MonotonicClock
from shared.config import SchedulerConfig, load
from shared.messages.edges import FromDetokenizer, FromTokenizer, FromWorker
from shared.service import new_incarnation, run
from shared.transport import Frames, Server

log = structlog.get_logger(__name__)

PROBE_AGAIN_S = (0.05, 0.5)
"""A socket may learn of a broken connection a moment after its monitor says so."""
SWITCH_S = 0.0005
"""So soon do threads that fill masks let the loop go on, where they hold the interpreter."""


class SchedulerService:
    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._servers: list[Server[Any]] = []
        self._running: asyncio.Task[None] | None = None
        self.scheduler: Scheduler | None = None
        self.kv_publisher: KvPublisher | None = None

    async def start(self) -> None:
        config = self._config
        _tame_garbage_collection()
        sys.setswitchinterval(SWITCH_S)
        ports = [
            _Port("tokenizer", config.tokenizer_bind, FromTokenizer, self._servers),
            _Port("detokenizer", config.detokenizer_bind, FromDetokenizer, self._servers),
            _Port("worker", config.worker_bind, FromWorker, self._servers),
        ]
        edges = Edges(*(port.server for port in ports))
        self.scheduler = scheduler = Scheduler(config, new_incarnation(), edges, MonotonicClock())
        core, handlers = scheduler.core, scheduler.handlers
        ports[0].connect(scheduler, handlers.from_tokenizer, core.frontends.probe)
        ports[1].connect(scheduler, handlers.from_detokenizer, core.probe_detokenizers)
        ports[2].connect(scheduler, handlers.from_worker, core.fleet.probe)
        if config.kv_events_endpoint:
            self._publish_kv_events(scheduler)
        await core.compiling.start()
        self._running = asyncio.create_task(scheduler.run())
        scheduler.wake.set()
        log.info("scheduler listens", epoch=core.epoch, endpoints=[port.server.endpoint for port in ports])

    def _publish_kv_events(self, scheduler: Scheduler) -> None:
        config, core = self._config, scheduler.core
        self.kv_publisher = KvPublisher(
            config.kv_events_endpoint, config.kv_events_replay_endpoint, config.kv_events_topic, config.kv_events_buffer
        )
        core.tree.observer = core.kv_events = KvEvents(config.page_size, self.kv_publisher.publish)

    async def drain(self) -> None:
        assert self.scheduler is not None
        self.scheduler.drain()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle(), self._config.drain_timeout)
        self.scheduler.abort_all("the server is shutting down", 503)
        await self._idle()

    async def close(self) -> None:
        if self._running is not None:
            self._running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._running
        if self.scheduler is not None:
            await self.scheduler.core.compiling.close()
            self.scheduler.core.masking.close()
        for server in self._servers:
            server.close()
        if self.kv_publisher is not None:
            self.kv_publisher.close()

    def heartbeat(self) -> None:
        assert self.scheduler is not None
        counters = self.scheduler.core.metrics.counters
        counters["malformed_messages"] = sum(server.malformed for server in self._servers)
        counters["keys_refused"] = curve.refused()
        self.scheduler.tick()

    async def _idle(self) -> None:
        assert self.scheduler is not None
        self.scheduler.idle.clear()
        self.scheduler.wake.set()
        await self.scheduler.idle.wait()


class _Port:
    """One bound socket, made before the scheduler it speaks to."""

    def __init__(self, kind: str, endpoint: str, receive: Any, servers: list[Server[Any]]) -> None:
        self.server: Server[Any] = Server(endpoint, receive, self._on_message, edge=kind, peers=(kind,))
        servers.append(self.server)
        self._scheduler: Scheduler | None = None
        self._handler: Handler | None = None

    def connect(self, scheduler: Scheduler, handler: Handler, probe: Any) -> None:
        self._scheduler = scheduler
        self._handler = handler
        loop = asyncio.get_running_loop()

        def on_disconnect() -> None:
            scheduler.disconnected(probe)
            for delay in PROBE_AGAIN_S:
                loop.call_later(delay, scheduler.disconnected, probe)

        self.server.watch(on_disconnect)
        self.server.on_writable = scheduler.wake.set

    def _on_message(self, identity: bytes, message: Any, frames: Frames) -> None:
        assert self._scheduler is not None
        assert self._handler is not None
        self._scheduler.receive(self._handler, identity, message)


def _tame_garbage_collection() -> None:
    """Requests and nodes are many and long-lived: looking at the young ones less often costs no more memory."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def main() -> int:
    config = load(SchedulerConfig, sys.argv[1:])
    tenants.require(config.api_key_file)
    return run("scheduler", config, lambda: SchedulerService(config))


if __name__ == "__main__":
    sys.exit(main())
