"""Real workers with a tiny random model in the test's own process, and answers of the same model by transformers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from services.gpu_worker.worker import Worker
from shared.config import WorkerConfig
from tests.gpu_worker.tiny_models import reference_logits
from tests.protocol.house import House


def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """What the fp32 model answers, computed whole for every token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(torch.argmax(reference_logits(model, tokens)[-1])))
    return tokens[len(prompt) :]


@dataclass
class RealWorker:
    """`kill` ends it as kill -9 would, as far as others can see: without a word."""

    worker: Worker
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    _beating: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.worker.start()
        self._beating = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        while True:
            self.worker.heartbeat()
            await asyncio.sleep(0.2)

    async def kill(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            self._beating = None
            await self.worker.close()


def real_worker(house: House, name: str, model: Path, **config: Any) -> RealWorker:
    settings: dict[str, Any] = {
        "scheduler": house.endpoints["w"],
        "service_id": name,
        "model_path": str(model),
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "max_total_tokens": 2048,
        "max_running_requests": 8,
        "page_size": 4,
        "drain_timeout": 20.0,
    }
    ended = asyncio.Event()
    return RealWorker(Worker(WorkerConfig(**{**settings, **config}), end_process=ended.set), ended)
