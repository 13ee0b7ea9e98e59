"""A worker as a process: how it ends when a signal comes while it loads, and what it imports when."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

LOADING = """
import sys, threading
from services.gpu_worker import __main__ as main
from shared.config import WorkerConfig

def start(config):
    print("loading", flush=True)
    {load}

sys.exit(main.run(WorkerConfig(scheduler="ipc:///nowhere"), start))
"""


def spawn(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.timeout(120)
def test_a_signal_while_loading_ends_the_process_at_once() -> None:
    with spawn(LOADING.format(load="threading.Event().wait()")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("module", "error", "traces"),
    [("models.config", "ModelError", False), ("memory", "MemoryPlanError", False), ("faults", "ProtocolError", True)],
)
def test_a_load_that_fails_is_told_and_ends_the_process(module: str, error: str, traces: bool) -> None:
    load = f"from services.gpu_worker.{module} import {error}; raise {error}('no such model')"
    with spawn(LOADING.format(load=load)) as process:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1
        assert "no such model" in errors
        assert ("Traceback" in errors) == traces  # what the user asked for is told in a sentence


@pytest.mark.timeout(120)
def test_threads_are_set_up_before_torch_is_imported() -> None:
    code = """
import os, sys
from services.gpu_worker import __main__ as main
assert "torch" not in sys.modules
from services.gpu_worker.device import set_thread_environment
set_thread_environment(3)
assert "torch" not in sys.modules
print(*(os.environ[n] for n in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "GOMP_SPINCOUNT", "OMP_NUM_THREADS")))
"""
    environment = {"PATH": "", "PYTHONPATH": "."}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["passive", "0", "3000", "3"]
