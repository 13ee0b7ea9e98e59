"""Keeps child processes alive, ends them in order. Knows nothing of what they do.

A child that dies before everybody is ready ends the whole; later it is started again, with growing delays and a
limit. Each child leads its own process group, so that Ctrl-C reaches the launcher alone and a kill takes the
child's own children along.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from radixfleet.pipes import ByteListener

MAX_DEATHS = 5
DEATHS_WITHIN_S = 60.0
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
WATCH_INTERVAL_S = 2.0
PARENT_FD = "RADIXFLEET_PARENT_FD"
ALIVE_FD = "RADIXFLEET_ALIVE_FD"
READY_FD = "RADIXFLEET_READY_FD"


class ChildFailed(Exception):
    """The whole cannot go on; the text names the child and how it ended."""


@dataclass(frozen=True)
class ChildSpec:
    """`announces`: it says by itself, in its first life, when it does its work."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str]
    fds: tuple[int, ...] = ()
    announces: bool = False


class Child:
    """One process and its successors."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.ready = ByteListener() if spec.announces else None
        self.deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self.process: asyncio.subprocess.Process | None = None
        self.alive: ByteListener | None = None
        self.killed_by_us = False

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self, parent_fd: int) -> None:
        spec = self.spec
        self.killed_by_us = False
        self.alive = ByteListener()
        env = {**spec.env, PARENT_FD: str(parent_fd), ALIVE_FD: str(self.alive.write_fd)}
        fds = [*spec.fds, parent_fd, self.alive.write_fd]
        if self.ready is not None and self.process is None:
            env[READY_FD] = str(self.ready.write_fd)
            fds.append(self.ready.write_fd)
        try:
            self.process = await asyncio.create_subprocess_exec(
                *spec.argv, env=env, pass_fds=tuple(fds), process_group=0, stdin=asyncio.subprocess.DEVNULL
            )
        finally:
            self.alive.close_write_end()
            if self.ready is not None:
                self.ready.close_write_end()

    async def wait(self) -> int:
        assert self.process is not None
        code = await self.process.wait()
        if self.alive is not None:
            self.alive.close()
        return code

    def signal(self, number: int) -> None:
        if self.running and self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(number)

    def kill_group(self) -> None:
        """The child, if it lives, and everything it started that is still in its group."""
        if self.running:
            self.killed_by_us = True
            self.kill_rest()

    def kill_rest(self) -> None:
        """What is left of the group of a child that has just ended."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)


class Supervisor:
    """Starts all children, watches them until `stop`. `say` gets lines for the user."""

    def __init__(self, specs: Sequence[ChildSpec], say: Callable[[str], None], frozen_timeout: float = 0.0) -> None:
        self.children = {spec.name: Child(spec) for spec in specs}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._say = say
        self._frozen_timeout = frozen_timeout
        self._all_ready = False
        self._stopping = False
        self._parent_read, self._parent_write = os.pipe()  # its end of file tells the children that we are gone
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        for child in self.children.values():
            self._tasks.append(asyncio.create_task(self._look_after(child)))
        if self._frozen_timeout > 0:
            self._tasks.append(asyncio.create_task(self._watch()))

    async def ready(self) -> None:
        """Until everybody who announces it does its work, each with a line. Deaths before show in `failed`."""
        began = asyncio.get_running_loop().time()
        waiting = {child.ready.first_byte: child.spec.name for child in self.children.values() if child.ready}
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            names = ", ".join(waiting.pop(one) for one in done)
            left = ", ".join(waiting.values())
            seconds = asyncio.get_running_loop().time() - began
            self._say(f"{names} ready after {seconds:.1f} s" + (f", waiting for {left}" if left else ""))

    def settled(self) -> None:
        """The start is over: from now on the dead are replaced."""
        self._all_ready = True

    async def stop(self, order: Sequence[tuple[Sequence[str], float]]) -> None:
        """End the children stage by stage: (names, seconds before they are killed)."""
        self._stopping = True
        for names, seconds in order:
            await self._stop_stage([self.children[name] for name in names], seconds)

    def kill_all(self) -> None:
        """At once, with no order and no grace."""
        self._stopping = True
        for child in self.children.values():
            child.kill_group()

    async def close(self) -> None:
        """Leave no process behind."""
        self.kill_all()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for child in self.children.values():
            if child.process is not None:
                await child.wait()
            if child.ready is not None:
                child.ready.close()
        os.close(self._parent_read)
        os.close(self._parent_write)

    async def _stop_stage(self, children: Sequence[Child], seconds: float) -> None:
        for child in children:
            child.signal(signal.SIGTERM)
        waits = [asyncio.ensure_future(child.wait()) for child in children if child.running]
        if waits:
            _, late = await asyncio.wait(waits, timeout=seconds)
            if late:
                names = [child.spec.name for child in children if child.running]
                self._say(f"{', '.join(names)} did not end within {seconds:g} s: killed")
        for child in children:
            child.kill_group()
        await asyncio.gather(*waits)

    async def _look_after(self, child: Child) -> None:
        try:
            while not self._stopping:
                await child.start(self._parent_read)
                code = await child.wait()
                child.kill_rest()
                if self._stopping:
                    return
                await self._after_death(child, describe_exit(code, killed_by_us=child.killed_by_us))
        except ChildFailed as error:
            self._fail(error)
        except OSError as error:
            self._fail(ChildFailed(f"{child.spec.name} cannot be started: {error}"))

    async def _after_death(self, child: Child, how: str) -> None:
        name = child.spec.name
        if not self._all_ready:
            raise ChildFailed(f"{name} {how} before the server was ready")
        now = asyncio.get_running_loop().time()
        child.deaths.append(now)
        if len(child.deaths) == MAX_DEATHS and now - child.deaths[0] < DEATHS_WITHIN_S:
            raise ChildFailed(f"{name} {how}, for the {MAX_DEATHS}th time within {DEATHS_WITHIN_S:g} s")
        recent = sum(1 for death in child.deaths if now - death < DEATHS_WITHIN_S)
        delay = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (recent - 1))
        self._say(f"{name} {how}, starting it again in {delay:g} s")
        await asyncio.sleep(delay)

    def _fail(self, error: ChildFailed) -> None:
        if not self.failed.done() and not self._stopping:
            self.failed.set_exception(error)

    async def _watch(self) -> None:
        """Kill who lives but has stopped giving signs of life; the rest is the way of all the dead."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(WATCH_INTERVAL_S, self._frozen_timeout / 2))
            for child in self.children.values():
                last = child.alive.last_heard if child.alive is not None else None
                if child.running and last is not None and loop.time() - last > self._frozen_timeout:
                    self._say(f"{child.spec.name} has been silent for {loop.time() - last:.0f} s: killed")
                    child.kill_group()


def describe_exit(code: int, *, killed_by_us: bool = False) -> str:
    """How a process ended; a SIGKILL that nobody here sent is mostly the system's, for want of memory."""
    if code >= 0:
        return f"ended with code {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" and not killed_by_us else "")
