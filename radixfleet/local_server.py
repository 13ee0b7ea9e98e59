"""LocalServer: `radixfleet serve` as a child of this process, ready when it says so and always stopped.

Leaves what is served to the flags, and requests to whoever has the URL.
"""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

READY_LINE = "The server is fired up and ready to roll!"
_STOP_GRACE_S = 45.0


class ServerFailed(RuntimeError):
    """The server ended, or was not ready in time; the message carries its last lines."""


class LocalServer:
    """A context manager: starts on enter (raises ServerFailed), stops on exit.

    `flags` are those of `radixfleet serve`; a free port is taken unless `--port` is among them.
    """

    def __init__(
        self,
        *flags: str,
        env: Mapping[str, str] | None = None,
        log_file: Path | None = None,
        ready_timeout: float = 300.0,
    ) -> None:
        self._flags = list(flags)
        if "--port" not in self._flags:
            self._flags += ["--port", str(free_port())]
        self.port = int(self._flags[self._flags.index("--port") + 1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._env = {**os.environ, **(env or {})}
        self._log_file = log_file
        self._ready_timeout = ready_timeout
        self._ready = threading.Event()
        self._tail: collections.deque[str] = collections.deque(maxlen=400)
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    @property
    def process(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise ServerFailed("the server was not started")
        return self._process

    @property
    def output(self) -> str:
        """The last lines the server printed."""
        return "".join(self._tail)

    def start(self) -> None:
        """Start and wait until ready. Raises ServerFailed."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "radixfleet", "serve", *self._flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=self._env,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, name="server-output", daemon=True)
        self._reader.start()
        if not self._ready.wait(self._ready_timeout) or READY_LINE not in self.output:
            self.stop()
            raise ServerFailed(f"radixfleet serve did not become ready:\n{self.output}")

    def stop(self) -> int:
        """Drain and end it; returns the exit code. Kills what does not end in time."""
        process = self.process
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
        code = process.wait()
        if self._reader is not None:
            self._reader.join(5)
        if process.stdout is not None:
            process.stdout.close()
        return code

    def __enter__(self) -> LocalServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.ExitStack() as stack:
            log = stack.enter_context(self._log_file.open("a")) if self._log_file is not None else None
            for line in self.process.stdout:
                self._tail.append(line)
                if log is not None:
                    log.write(line)
                    log.flush()
                if READY_LINE in line:
                    self._ready.set()
        self._ready.set()  # the end of output wakes whoever waits


def free_port() -> int:
    """A TCP port on the loopback interface that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
