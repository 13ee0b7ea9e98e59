"""Real workers with a toy model whose device fails, under the real scheduler: requests go on, and no token is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import torch

from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.cuda.device import HostDevice
from services.gpu_worker.cuda.engine import PipelinedEngine
from services.gpu_worker.startup import StartedEngine
from services.gpu_worker.worker import Worker
from shared.config import WorkerConfig
from shared.messages.stream import FinishReason
from tests.fakes import FakeDetokenizer, FakeFrontend
from tests.gpu_worker.toy_engine import Bench, toy_greedy
from tests.local_peers import worker_hello
from tests.protocol.house import House
from tests.protocol.real_workers import RealWorker

COUNT = 20
TOO_LARGE = 77
"""A first token whose request needs more memory than there is, however alone it is."""

Check = Callable[[ForwardBatch], None]


def toy_worker(house: House, name: str, check: Check, *, pipelined: bool) -> RealWorker:
    """`check` is asked before every forward, and may raise."""
    bench = Bench(slots=8, pages=128, context=128, max_tokens=128)
    forward = bench.runner.forward

    def checked(batch: ForwardBatch) -> torch.Tensor:
        check(batch)
        return forward(batch)

    bench.runner.forward = checked  # type: ignore[method-assign]

    def start(config: WorkerConfig) -> StartedEngine:
        limits = bench.limits
        sizes = {
            "page_size": limits.page_size,
            "num_pages": limits.num_pages,
            "max_slots": limits.max_slots,
            "max_batched_tokens": 128,
            "max_context": limits.max_context,
            "max_inflight_steps": config.max_inflight_steps,
            "vocab_size": limits.vocab_size,
        }
        engine = PipelinedEngine(bench.engine, HostDevice()) if pipelined else bench.engine
        return StartedEngine(engine, worker_hello("", 0, **sizes))

    ended = asyncio.Event()
    config = WorkerConfig(scheduler=house.endpoints["w"], service_id=name, drain_timeout=5.0)
    return RealWorker(Worker(config, start, ended.set), ended)


@asynccontextmanager
async def working(
    house: House, pipelined: bool, *checks: Check
) -> AsyncIterator[tuple[list[RealWorker], FakeDetokenizer, FakeFrontend]]:
    await house.scheduler(page_size=4)
    workers = [toy_worker(house, f"w{number}", check, pipelined=pipelined) for number, check in enumerate(checks)]
    for worker in workers:
        await worker.start()
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    await frontend.until(lambda: len(house.core.fleet) == len(workers))
    try:
        yield workers, detokenizer, frontend
    finally:
        for worker in workers:
            await worker.kill()


def prompt(number: int) -> list[int]:
    return [(7 * number + i) % 70 for i in range(10 + number)]


def submit(frontend: FakeFrontend, count: int) -> None:
    for number in range(count):
        frontend.submit(f"r{number}", prompt(number), COUNT)


async def answered(detokenizer: FakeDetokenizer, count: int) -> None:
    rids = [f"r{number}" for number in range(count)]
    await detokenizer.until(lambda: detokenizer.finished(*rids), timeout=40)
    for number, rid in enumerate(rids):
        assert detokenizer.streams[rid].tokens == toy_greedy(prompt(number), COUNT)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("pipelined", [False, True])
async def test_too_many_rows_for_the_memory_are_served_a_few_at_a_time(house: House, pipelined: bool) -> None:
    faults = 0

    def check(batch: ForwardBatch) -> None:
        nonlocal faults
        if batch.num_rows > 3:
            faults += 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    async with working(house, pipelined, check) as (_, detokenizer, frontend):
        submit(frontend, 8)
        await answered(detokenizer, 8)
    assert 1 <= faults <= 4


@pytest.mark.timeout(60)
@pytest.mark.parametrize("pipelined", [False, True])
async def test_what_does_not_fit_even_alone_ends_and_all_others_live(house: House, pipelined: bool) -> None:
    faults = 0

    def check(batch: ForwardBatch) -> None:
        nonlocal faults
        if ((batch.token_ids == TOO_LARGE) & (batch.positions == 0)).any():
            faults += 1
            raise torch.OutOfMemoryError("CUDA out of memory")

    async with working(house, pipelined, check) as (_, detokenizer, frontend):
        submit(frontend, 5)
        frontend.submit("large", [TOO_LARGE, *prompt(3)], COUNT)
        await detokenizer.until(lambda: detokenizer.finished("large"))
        finish = detokenizer.streams["large"].finish
        assert finish is not None
        assert finish.reason is FinishReason.ERROR
        assert "not even alone" in finish.message
        await answered(detokenizer, 5)
        frontend.submit("later", prompt(9), COUNT)
        await detokenizer.until(lambda: detokenizer.finished("later"))
        assert detokenizer.streams["later"].tokens == toy_greedy(prompt(9), COUNT)
        (worker,) = house.core.fleet
        assert worker.hello.max_slots == 8, "the size is what it was, once the culprit is gone"
    assert 2 <= faults <= 8


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
    ],
)
@pytest.mark.parametrize("pipelined", [False, True])
async def test_a_device_error_ends_the_worker_and_its_requests_go_on_elsewhere(
    house: House, error: Exception, pipelined: bool
) -> None:
    steps = 0

    def failing(batch: ForwardBatch) -> None:
        nonlocal steps
        steps += 1
        if steps > 3:
            raise error

    async with working(house, pipelined, failing, lambda batch: None) as (workers, detokenizer, frontend):
        submit(frontend, 6)
        await asyncio.wait_for(workers[0].ended.wait(), 20)
        assert workers[0].worker.exit_code == 1
        assert workers[0].worker.device_lost
        await answered(detokenizer, 6)
        assert not workers[1].ended.is_set()
    assert steps == 4, "nothing is asked of a device whose context is lost"
