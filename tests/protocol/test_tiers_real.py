"""Reloaded pages alone give the reference text: real kernels, a tiny random model, fp32, recomputing switched off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.gpu_worker.tiny_models import random_tokens, save_model
from tests.protocol.house import House
from tests.protocol.real_workers import greedy, real_worker

PROMPTS = [random_tokens(90, seed=seed) for seed in range(3)]
COUNT = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return save_model("qwen3", folder)


@pytest.mark.parametrize("host_gb", [0.0, 0.0001, 0.01])
async def test_evicted_pages_come_back_and_survive_a_restart(
    house: House, folder: Path, model: Any, tmp_path: Path, host_gb: float
) -> None:
    """Device 40 pages; host none, 12 or more than enough pages; disk more than enough."""
    await house.scheduler(recompute=False, transfer_timeout=60.0, page_size=4, heartbeat_timeout=20.0)
    config = {
        "max_total_tokens": 160,
        "host_cache_gb": host_gb,
        "disk_cache_gb": 0.01,
        "disk_cache_dir": str(tmp_path / "disk"),
    }
    worker = real_worker(house, "w0", folder, **config)
    await worker.start()
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    core = house.core
    await frontend.until(lambda: len(core.fleet) == 1)

    async def ask(rid: str, prompt: list[int]) -> int:
        frontend.submit(rid, prompt, COUNT)
        await detokenizer.until(lambda: detokenizer.finished(rid))
        assert detokenizer.streams[rid].tokens == greedy(model, prompt, COUNT), rid
        return detokenizer.streams[rid].cached_tokens

    try:
        for number, prompt in enumerate(PROMPTS):
            assert await ask(f"first-{number}", prompt) == 0
        assert await ask("again", PROMPTS[0]) >= (60 if host_gb == 0.0001 else 88)
        counters = core.metrics.counters
        reloaded = counters["host_reloaded_tokens"] + counters["disk_reloaded_tokens"]
        assert reloaded >= 40
        if host_gb == 0.01:
            assert counters["disk_stored_tokens"] == 0
            return
        await worker.kill()
        worker = real_worker(house, "w0", folder, **config)
        await worker.start()
        await frontend.until(
            lambda: any(w.tiers["disk"].pool.free < w.tiers["disk"].pool.num_pages for w in core.fleet)
        )
        assert await ask("restarted", PROMPTS[1]) >= 40
        assert counters["tiers_emptied"] == 0
    finally:
        await worker.kill()
