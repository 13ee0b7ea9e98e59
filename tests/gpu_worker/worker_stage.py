"""A worker with a toy engine on a stage, and the scheduler that a test plays. Leaves what they do to the tests."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any, TypeVar

from services.gpu_worker.startup import StartedEngine
from services.gpu_worker.worker import Worker
from shared.config import WorkerConfig
from shared.ints import pack
from shared.messages.control import Heartbeat, Ping, Pong
from shared.messages.edges import FromWorker
from shared.messages.step import (
    StepCommand,
    StepResult,
    WorkerHello,
    WorkerWelcome,
)
from shared.transport import Frames, Server
from tests.gpu_worker.toy_engine import VOCAB, Bench, open_slot, prefill

M = TypeVar("M")
PROMPT = [5, 17, 3]
WORDS = -(-VOCAB // 32)


class Script:
    """A scheduler that does what the test says."""

    def __init__(self, endpoint: str) -> None:
        self.inbox: asyncio.Queue[tuple[bytes, Any]] = asyncio.Queue()
        self.server: Server[FromWorker] = Server(endpoint, FromWorker, self._on_message)
        self.identity = b""
        self.steps = 0
        self.epoch = 3

    def _on_message(self, identity: bytes, message: FromWorker, frames: Frames) -> None:
        self.inbox.put_nowait((identity, message))

    async def next(self, kind: type[M]) -> M:
        """The next message of that kind; heartbeats and repeated hellos in between are passed over."""
        async with asyncio.timeout(20):
            while True:
                sender, message = await self.inbox.get()
                if isinstance(message, kind):
                    self.identity = sender
                    return message
                assert isinstance(message, (Heartbeat, WorkerHello)), message

    async def welcome(self) -> WorkerHello:
        hello = await self.next(WorkerHello)
        self.send(WorkerWelcome(self.epoch))
        self.steps = 0
        return hello

    def send(self, message: Any, *frames: bytes) -> None:
        self.server.send(self.identity, message, *frames)

    def step(self, decode: list[int] | None = None, **fields: Any) -> int:
        step = self.steps
        self.send(StepCommand(step_id=step, epoch=self.epoch, decode_slots=pack(decode or []), **fields))
        self.steps += 1
        return step

    def open(self, slot: int = 0, **fields: Any) -> int:
        pages = [slot * 4 + i for i in range(4)]
        return self.step(opens=(open_slot(slot, 3, pages, **fields),), prefills=(prefill(slot, PROMPT),))

    async def result(self) -> StepResult:
        return await self.next(StepResult)


class Stage:
    """A worker with a toy engine whose forward can be held up, and its scheduler."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.endpoint = f"ipc://{folder}/worker"
        self.bench = Bench()
        self.gate = threading.Event()
        self.gate.set()
        self.in_forward = threading.Event()
        self.ended = asyncio.Event()
        forward = self.bench.runner.forward

        def gated(batch: Any) -> Any:
            self.in_forward.set()
            assert self.gate.wait(20)
            return forward(batch)

        self.bench.runner.forward = gated  # type: ignore[method-assign]
        config = WorkerConfig(scheduler=self.endpoint, service_id="w1", drain_timeout=5.0, **settings)
        self.worker = Worker(config, self._start, self.ended.set)
        self.script = Script(self.endpoint)

    def _start(self, config: WorkerConfig) -> StartedEngine:
        limits = self.bench.limits
        hello = WorkerHello(
            worker_id="",
            incarnation=0,
            model="toy",
            model_digest="d",
            page_size=limits.page_size,
            num_pages=limits.num_pages,
            max_slots=limits.max_slots,
            max_batched_tokens=64,
            max_context=limits.max_context,
            max_inflight_steps=config.max_inflight_steps,
            vocab_size=limits.vocab_size,
            device="cpu",
            kv_dtype="float32",
            kv_layout="HND",
            kv_bytes_per_page=16,
        )
        return StartedEngine(self.bench.engine, hello)

    async def reached_forward(self) -> None:
        assert await asyncio.to_thread(self.in_forward.wait, 20)
        self.in_forward.clear()

    async def waits_for_masks(self) -> None:
        """The step in execution has done its forward and waits."""
        await self.reached_forward()
        self.gate.set()
        while True:
            self.worker.heartbeat()
            if (await self.script.next(Heartbeat)).step_age_ms == 0:
                return

    async def turn(self) -> None:
        """Everything sent so far has gone through the worker's loop."""
        self.script.send(Ping(9))
        await self.script.next(Pong)
