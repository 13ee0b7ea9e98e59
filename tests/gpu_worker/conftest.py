"""What tests of the worker share."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.gpu_worker.cuda.start import ON_CPU
from tests.gpu_worker.tiny_models import save_model
from tests.gpu_worker.worker_stage import Stage


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama, for tests that only read it."""
    folder: Path = tmp_path_factory.mktemp("llama")
    save_model("llama", folder)
    return folder


@pytest.fixture(params=["", "1"], ids=["whole", "halves"])
def both_engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines that ask the switch of `cuda.start` execute steps in one piece, and in two."""
    monkeypatch.setenv(ON_CPU, request.param)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    await stage.worker.start()
    yield stage
    stage.gate.set()
    await stage.worker.close()
    assert not stage.worker.is_computing
    stage.script.server.close()
