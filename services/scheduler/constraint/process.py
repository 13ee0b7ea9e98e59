"""One compiling process as the scheduler sees it: asked over a pipe, killed when it takes too long.

Leaves sharing several of them to `pool`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import msgspec

from services.scheduler.constraint.limits import Limits
from services.scheduler.constraint.protocol import (
    LENGTH_BYTES,
    MAX_FRAME,
    FromProcess,
    Job,
    Ready,
    Setup,
    ToProcess,
    frame,
    from_process,
)

_START_SECONDS = 120.0
_ROOT = Path(__file__).resolve().parents[3]


class ProcessGone(RuntimeError):
    """The process ended, or was killed, before it answered."""


class TookTooLong(ProcessGone):
    """It was killed for the time it took."""


class CompileProcess:
    """Made by `start`. After any ProcessGone it is dead; asking for two things at once is the caller's mistake."""

    def __init__(self, inner: asyncio.subprocess.Process) -> None:
        self._inner = inner
        self.jobs = 0

    @classmethod
    async def start(cls, model_path: str, limits: Limits) -> CompileProcess:
        """A process that has loaded the vocabulary. Raises ProcessGone."""
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH", ""))))
        inner = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "services.scheduler.constraint.compile_worker",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,  # a terminal's Ctrl-C is the scheduler's to handle
        )
        process = cls(inner)
        try:
            answer = await process._exchange(Setup(model_path, limits), _START_SECONDS)
        except BaseException:
            await process.kill()
            raise
        assert isinstance(answer, Ready)
        return process

    @property
    def pid(self) -> int:
        return self._inner.pid

    @property
    def alive(self) -> bool:
        return self._inner.returncode is None

    async def ask(self, job: Job, seconds: float) -> FromProcess:
        """Its answer. Raises TookTooLong or ProcessGone; both times, and when cancelled, the process is killed."""
        self.jobs += 1
        try:
            return await self._exchange(job, seconds)
        except BaseException:
            await self.kill()
            raise

    async def kill(self) -> None:
        """End it at once and wait until it has ended."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself a moment ago
                self._inner.kill()
        await self._inner.wait()
        if self._inner.stdin is not None:
            self._inner.stdin.close()

    async def _exchange(self, message: ToProcess, seconds: float) -> FromProcess:
        try:
            async with asyncio.timeout(seconds):
                return await self._round_trip(message)
        except TimeoutError:
            raise TookTooLong(f"no answer within {seconds:g} seconds") from None
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError) as error:
            raise ProcessGone(f"the compiling process ended: {error}") from None

    async def _round_trip(self, message: ToProcess) -> FromProcess:
        assert self._inner.stdin is not None
        assert self._inner.stdout is not None
        self._inner.stdin.write(frame(message))
        await self._inner.stdin.drain()
        size = int.from_bytes(await self._inner.stdout.readexactly(LENGTH_BYTES), "little")
        if size > MAX_FRAME:
            raise ProcessGone("the compiling process wrote nonsense")
        return from_process.decode(await self._inner.stdout.readexactly(size))
