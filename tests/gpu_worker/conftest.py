"""What tests of the worker share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.gpu_worker.worker_stage import Stage


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    await stage.worker.start()
    yield stage
    stage.gate.set()
    await stage.worker.close()
    assert not stage.worker.is_computing
    stage.script.server.close()
