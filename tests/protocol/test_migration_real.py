"""Migrated pages alone give the reference text: real kernels, a tiny random model, fp32, recomputing switched off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu_worker.tiny_models import random_tokens, save_model
from tests.protocol.house import House
from tests.protocol.real_workers import RealWorker, greedy, real_worker

PROMPT = random_tokens(90, seed=3)
COUNT = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return save_model("qwen3", folder)


@pytest.fixture
async def workers(house: House, folder: Path, model: Any) -> AsyncIterator[list[RealWorker]]:
    await house.scheduler(recompute=False, transfer_timeout=60.0, page_size=4, heartbeat_timeout=20.0)
    found = [real_worker(house, f"w{n}", folder) for n in range(2)]
    for worker in found:
        await worker.start()
    yield found
    for worker in found:
        await worker.kill()


async def test_a_drained_request_goes_on_with_its_pages(
    house: House, folder: Path, model: Any, workers: list[RealWorker]
) -> None:
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    core = house.core
    await frontend.until(lambda: len(core.fleet) == 2)
    frontend.submit("r", PROMPT, COUNT)
    await detokenizer.until(lambda: "r" in detokenizer.streams and len(detokenizer.streams["r"].tokens) >= 5)
    first = core.lifecycle.requests["r"].worker
    assert first is not None
    done = await frontend.operate("drain_worker", first.worker_id)
    assert done.ok
    await detokenizer.until(lambda: detokenizer.finished("r"))
    stream = detokenizer.streams["r"]
    assert stream.tokens == greedy(model, PROMPT, COUNT)
    assert stream.retractions == 1
    counters = core.metrics.counters
    assert counters["transfers"] == 1
    assert counters["transferred_tokens"] >= 88
    # The last page, which was not full, and what was in flight when the request lost its seat.
    assert counters["recomputed_tokens"] <= 4 + 4
    left = next(worker for worker in workers if worker.worker._worker_id == first.worker_id)
    await asyncio.wait_for(left.ended.wait(), 20)
    assert left.worker.exit_code == 0


async def test_another_request_uses_the_pages_of_a_worker_without_a_seat(
    house: House, folder: Path, model: Any
) -> None:
    await house.scheduler(
        recompute=False, transfer_timeout=60.0, page_size=4, heartbeat_timeout=20.0, max_running_requests=1
    )
    found = [real_worker(house, f"w{n}", folder) for n in range(2)]
    try:
        for worker in found:
            await worker.start()
        detokenizer, frontend = await house.detokenizer(), await house.frontend()
        core = house.core
        await frontend.until(lambda: len(core.fleet) == 2)
        frontend.submit("first", PROMPT, 2)
        await detokenizer.until(lambda: detokenizer.finished("first"))
        frontend.submit("long", PROMPT, 160)
        frontend.submit("second", [*PROMPT, 5], COUNT)
        await detokenizer.until(lambda: detokenizer.finished("second"))
        assert detokenizer.streams["second"].tokens == greedy(model, [*PROMPT, 5], COUNT)
        assert detokenizer.streams["second"].cached_tokens == 88
        assert core.metrics.counters["transferred_tokens"] == 88
        frontend.abort("long")
    finally:
        for worker in found:
            await worker.kill()
