"""The real scheduler service and fake peers over ipc sockets; leaves their folder to the fixture."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from services.scheduler.__main__ import SchedulerService
from services.scheduler.core import Core
from shared.config import SchedulerConfig
from tests.fakes import FakeDetokenizer, FakeFrontend, FakeWorker
from tests.local_peers import worker_hello

TICK_S = 0.1


class House:
    """Everything of one test; `close` ends what is left."""

    def __init__(self, folder: Path) -> None:
        self.endpoints = {name: f"ipc://{folder}/{name}" for name in ("t", "d", "w")}
        self.service: SchedulerService | None = None
        self._peers: list[Any] = []
        self._ticking: asyncio.Task[None] | None = None

    @property
    def core(self) -> Core:
        """Of the scheduler that runs now."""
        assert self.service is not None
        assert self.service.scheduler is not None
        return self.service.scheduler.core

    async def scheduler(self, **config: Any) -> SchedulerService:
        settings = SchedulerConfig(
            tokenizer_bind=self.endpoints["t"],
            detokenizer_bind=self.endpoints["d"],
            worker_bind=self.endpoints["w"],
            # Here all share one event loop: what holds it up must not look like a loss.
            **{"heartbeat_timeout": 60.0, **config},
        )
        self.service = SchedulerService(settings)
        await self.service.start()
        assert self.service.scheduler is not None
        self.service.scheduler.checking = True
        self._ticking = asyncio.create_task(self._tick())
        return self.service

    async def restart_scheduler(self, **config: Any) -> SchedulerService:
        """The process is killed and another one takes its place."""
        assert self.service is not None
        await self._stop_ticking()
        await self.service.close()
        return await self.scheduler(**config)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(work)

    async def _tick(self) -> None:
        while True:
            assert self.service is not None
            self.service.heartbeat()
            await asyncio.sleep(TICK_S)

    async def worker(
        self, worker_id: str = "w0", incarnation: int = 1, step_s: float = 0.0, **hello: Any
    ) -> FakeWorker:
        worker = FakeWorker(self.endpoints["w"], worker_hello(worker_id, incarnation, **hello), step_s)
        self._peers.append(worker)
        await worker.greeted.wait()
        return worker

    async def detokenizer(self, service_id: str = "detok", incarnation: int = 1) -> FakeDetokenizer:
        detokenizer = FakeDetokenizer(self.endpoints["d"], service_id, incarnation)
        self._peers.append(detokenizer)
        await detokenizer.greeted.wait()
        return detokenizer

    async def frontend(self, service_id: str = "front", incarnation: int = 1) -> FakeFrontend:
        frontend = FakeFrontend(self.endpoints["t"], service_id, incarnation)
        self._peers.append(frontend)
        await frontend.greeted.wait()
        return frontend

    async def close(self) -> None:
        await self._stop_ticking()
        for peer in self._peers:
            await peer.close()
        if self.service is not None:
            await self.service.close()

    async def _stop_ticking(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticking
            self._ticking = None
