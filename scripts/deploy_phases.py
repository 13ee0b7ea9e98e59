"""Phases of a check: a time limit for each, what it took, and commands that end with it. Tries nothing itself."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_CGROUPS = (Path("/sys/fs/cgroup/cpuacct/docker/cpuacct.usage"), Path("/sys/fs/cgroup/docker/cpu.stat"))


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class CheckFailed(Exception):
    pass


class NoEngine(CheckFailed):
    """No container engine answers, and none can be started here."""


def require(condition: bool, text: str) -> None:
    if not condition:
        raise CheckFailed(text)
    say(f"ok: {text}")


class Phases:
    """`with phases(name, limit): ...` and afterwards `table()`. `remaining()` bounds what runs inside."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, float, float]] = []
        self._name = "start"
        self._deadline = time.monotonic() + 60

    @contextlib.contextmanager
    def __call__(self, name: str, limit: float) -> Iterator[None]:
        started, cpu = time.monotonic(), _cpu_seconds()
        self._name, self._deadline = name, started + limit
        try:
            yield
        finally:
            spent = max(0.0, _cpu_seconds() - cpu)  # an engine that ends takes its own with it
            self._rows.append((name, time.monotonic() - started, spent))
            self._name, self._deadline = "the end", time.monotonic() + 180

    def remaining(self) -> float:
        """Seconds. Raises CheckFailed when there are none."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise CheckFailed(f"the phase {self._name!r} took longer than it may")
        return left

    def table(self) -> str:
        lines = [f"{'phase':<28} {'seconds':>8} {'CPU s':>8}"]
        lines += [f"{name:<28} {wall:8.1f} {cpu:8.1f}" for name, wall, cpu in self._rows]
        total = ("all phases", sum(row[1] for row in self._rows), sum(row[2] for row in self._rows))
        return "\n".join([*lines, "{:<28} {:8.1f} {:8.1f}".format(*total)])


phases = Phases()
_running: set[subprocess.Popen[str]] = set()


def run(*command: str, check: bool = True) -> str:
    """What it printed on stdout. It and its children are killed when its phase is over."""
    with subprocess.Popen(
        command, cwd=ROOT, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    ) as child:  # fmt: skip
        _running.add(child)
        try:
            output, errors = child.communicate(timeout=phases.remaining())
        except subprocess.TimeoutExpired:
            raise CheckFailed(f"{' '.join(command)}\ndid not end within the time of its phase") from None
        finally:
            _end(child)
            _running.discard(child)
    if check and child.returncode:
        raise CheckFailed(f"{' '.join(command)}\n{output[-3000:]}{errors[-3000:]}")
    return output.strip()


def _end(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def end_running() -> None:
    """What other threads still run is ended, with its children."""
    for child in list(_running):
        _end(child)


def succeeds(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=20).returncode == 0
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False


def until(what: str, condition: Callable[[], bool]) -> None:
    while not condition():
        try:
            phases.remaining()
        except CheckFailed as error:
            raise CheckFailed(f"{error}: {what}") from None
        time.sleep(0.5)  # an engine has nothing to wait on for this
    say(f"ok: {what}")


def _cpu_seconds() -> float:
    """Of our children that have ended, of containers and of dockerd; as far as this machine says so."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime + _container_cpu() + _engine_cpu()


def _container_cpu() -> float:
    for path in _CGROUPS:
        with contextlib.suppress(OSError):
            text = path.read_text()
            return int(text) / 1e9 if path.name == "cpuacct.usage" else int(text.split()[1]) / 1e6
    return 0.0


def _engine_cpu() -> float:
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            if name in ("dockerd", "containerd"):
                ticks += sum(int(field) for field in rest.split()[11:13])
    return ticks / os.sysconf("SC_CLK_TCK")
