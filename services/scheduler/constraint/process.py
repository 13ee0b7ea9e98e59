"""One compiling process as the scheduler sees it: asked over a socket pair, killed when it takes too long.

Leaves sharing several of them to `pool`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
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

    def __init__(
        self, inner: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._inner = inner
        self._reader = reader
        self._writer = writer
        self.jobs = 0

    @classmethod
    async def start(cls, model_path: str, limits: Limits) -> CompileProcess:
        """A process that has loaded the vocabulary. Raises ProcessGone."""
        ours, theirs = socket.socketpair()
        with theirs:
            # In a thread: to start a process takes milliseconds, which running streams would feel.
            starting = asyncio.create_task(asyncio.to_thread(_spawn, theirs))
            try:
                inner = await asyncio.shield(starting)
            except asyncio.CancelledError:
                ours.close()
                await _end(await starting)
                raise
        process = cls(inner, *await asyncio.open_connection(sock=ours))
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
        return self._inner.poll() is None

    async def ask(self, job: Job, seconds: float) -> FromProcess:
        """Its answer. Raises TookTooLong or ProcessGone; both times, and when cancelled, the process is killed."""
        self.jobs += 1
        try:
            return await self._exchange(job, seconds)
        except BaseException as error:
            await self.kill()
            if isinstance(error, ProcessGone) and self._inner.returncode == -signal.SIGXCPU:
                raise TookTooLong("it used up its processor time") from error
            raise

    async def kill(self) -> None:
        """End it at once and wait until it has ended."""
        self._writer.close()
        await _end(self._inner)

    async def _exchange(self, message: ToProcess, seconds: float) -> FromProcess:
        try:
            async with asyncio.timeout(seconds):
                return await self._round_trip(message)
        except TimeoutError:
            raise TookTooLong(f"no answer within {seconds:g} seconds") from None
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError) as error:
            raise ProcessGone(f"the compiling process ended: {error}") from None

    async def _round_trip(self, message: ToProcess) -> FromProcess:
        self._writer.write(frame(message))
        await self._writer.drain()
        size = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
        if size > MAX_FRAME:
            raise ProcessGone("the compiling process wrote nonsense")
        return from_process.decode(await self._reader.readexactly(size))


async def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # does nothing to one that has ended
    await asyncio.to_thread(process.wait)


def _spawn(theirs: socket.socket) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH", ""))))
    return subprocess.Popen(
        [sys.executable, "-m", "services.scheduler.constraint.compile_worker"],
        stdin=theirs.fileno(),
        stdout=theirs.fileno(),
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,  # a terminal's Ctrl-C is the scheduler's to handle
    )
