"""The compiling processes: few, started when needed, replaced when killed. Leaves the questions to the compiler."""

from __future__ import annotations

import asyncio

import structlog

from services.scheduler.constraint.limits import Limits
from services.scheduler.constraint.process import CompileProcess, ProcessGone
from services.scheduler.constraint.protocol import FromProcess, Job

log = structlog.get_logger(__name__)

_JOBS = 1000  # then a process is replaced: what its allocator keeps is given back


class ProcessPool:
    """At most `most` processes. Jobs are served in the order they came."""

    def __init__(self, model_path: str, limits: Limits, most: int) -> None:
        self._model_path = model_path
        self._limits = limits
        self._turns = asyncio.Semaphore(most)
        self._idle: list[CompileProcess] = []
        self._busy: set[CompileProcess] = set()
        self._starting: set[asyncio.Task[None]] = set()
        self._closed = False

    async def start(self) -> None:
        """Have one process ready. Raises ProcessGone."""
        self._idle.append(await CompileProcess.start(self._model_path, self._limits))

    async def ask(self, job: Job, seconds: float) -> FromProcess:
        """Raises ProcessGone; TookTooLong after `seconds` of processor time, or far more by the clock."""
        async with self._turns:
            if self._closed:
                raise ProcessGone("the compiler is closed")
            process = await self._take()
            try:
                return await process.ask(job, seconds * self._limits.patience)
            finally:
                await self._give_back(process)

    async def close(self) -> None:
        """Kill all of them."""
        self._closed = True
        for task in list(self._starting):
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for process in [*self._idle, *self._busy]:
            await process.kill()
        self._idle.clear()

    async def _take(self) -> CompileProcess:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                self._busy.add(process)
                return process
        process = await CompileProcess.start(self._model_path, self._limits)
        self._busy.add(process)
        return process

    async def _give_back(self, process: CompileProcess) -> None:
        self._busy.discard(process)
        if process.alive and process.jobs < _JOBS and not self._closed:
            self._idle.append(process)
            return
        await process.kill()
        if not self._closed and not self._idle:
            # the next job should not wait for a new interpreter
            task = asyncio.create_task(self._replace())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _replace(self) -> None:
        try:
            await self.start()
        except ProcessGone as error:
            log.error("compiler_not_replaced", error=str(error))
