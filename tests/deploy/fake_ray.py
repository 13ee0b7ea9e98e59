"""The part of Ray that the launcher uses, with processes of this machine as its nodes: placing, waiting, cancelling."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_TASK = """
import json, sys
from radixfleet.launchers_ray import run_worker
arguments, variables = json.loads(sys.argv[1])
sys.exit(run_worker(arguments, variables))
"""


class Reference:
    """A task that runs; hashable like an ObjectRef."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process


class FakeRay:
    """`options` are what tasks were declared with; `references` all that were ever started."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder  # where the nodes find the package
        self.inits: list[dict[str, Any]] = []
        self.options: dict[str, Any] = {}
        self.references: list[Reference] = []
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")
        self.down = False

    def init(self, **options: Any) -> None:
        self.inits.append(options)

    def remote(self, **options: Any) -> Any:
        self.options = options
        return lambda function: SimpleNamespace(remote=self._start)

    def wait(
        self, references: Sequence[Reference], num_returns: int, timeout: float
    ) -> tuple[list[Reference], list[Reference]]:
        deadline = time.monotonic() + timeout
        pause = threading.Event()
        while True:
            ended = [reference for reference in references if reference.process.poll() is not None]
            if len(ended) >= num_returns or time.monotonic() > deadline:
                return ended[:num_returns], [r for r in references if r not in ended[:num_returns]]
            pause.wait(0.02)

    def get(self, reference: Reference) -> int:
        return reference.process.returncode

    def cancel(self, reference: Reference) -> None:
        if reference.process.poll() is None:
            reference.process.send_signal(signal.SIGINT)

    def shutdown(self) -> None:
        self.down = True

    def _start(self, arguments: list[str], variables: dict[str, str]) -> Reference:
        import msgspec

        words = [sys.executable, "-c", _TASK, msgspec.json.encode((arguments, variables)).decode()]
        reference = Reference(subprocess.Popen(words, cwd=self._folder))
        self.references.append(reference)
        return reference
