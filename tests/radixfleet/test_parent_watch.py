"""The watcher that ends a server whose parent is gone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from radixfleet import parent_watch


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def test_the_end_of_the_parent_ends_the_server(sleeper: subprocess.Popen[bytes]) -> None:
    watcher = parent_watch.start(sleeper.pid)
    assert watcher.stdin is not None
    watcher.stdin.close()
    assert sleeper.wait(30) == -15
    assert watcher.wait(30) == 0


def test_a_released_watcher_ends_nothing(sleeper: subprocess.Popen[bytes]) -> None:
    watcher = parent_watch.start(sleeper.pid)
    parent_watch.release(watcher)
    assert watcher.returncode == 0
    assert sleeper.poll() is None
