"""Memory that runs out and devices that fail: what an error is taken for, and how small the next step is."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker import memory, startup, worker
from services.gpu_worker.faults import ProtocolError, classify
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.memory import MIB, MemoryPlanError, PoolWish, allocate_pool, least_pages
from services.gpu_worker.parallel.group import GroupBroken
from services.gpu_worker.startup import start_engine
from services.gpu_worker.step_size import EPISODE_STEPS, LEAST_TOKENS, StepSize, StepSizes
from shared.config import WorkerConfig
from shared.messages.step import WorkerFault, WorkerHello, WorkerReset
from tests.gpu_worker.toy_engine import open_slot, prefill, tokens, toy_greedy
from tests.gpu_worker.worker_stage import PROMPT, Stage


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ProtocolError("out of memory"), "protocol"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "oom"),
        (RuntimeError("CUDA error: out of memory"), "oom"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: can't allocate memory"), "oom"),
        (MemoryError(), "oom"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "oom"),
        (OSError(errno.EIO, "broken"), "internal"),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), "cuda"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "cuda"),
        (RuntimeError("CUDA Error: an illegal memory access was encountered (700) /kernel.cuh: line 9"), "cuda"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"), "cuda"),
        (RuntimeError("CUDA driver error: unspecified launch failure"), "cuda"),
        (RuntimeError("NCCL Error 2: unhandled system error"), "nccl"),
        (GroupBroken("OutOfMemoryError: CUDA out of memory."), "nccl"),
        (GroupBroken("AcceleratorError: CUDA error: unknown error"), "nccl"),
        (ValueError("a word about memory"), "internal"),
    ],
)
def test_what_an_error_is_taken_for(error: Exception, kind: str) -> None:
    assert classify(error) == kind


def allocator(room: int) -> tuple[list[int], Callable[[int], str | None]]:
    asked: list[int] = []

    def build(pages: int) -> str | None:
        asked.append(pages)
        return f"{pages} pages" if pages <= room else None

    return asked, build


@pytest.mark.parametrize("room", [1000, 999, 640, 101, 100])
def test_a_pool_shrinks_until_there_is_memory_for_it(room: int) -> None:
    asked, build = allocator(room)
    built, pages = allocate_pool(1000, 100, build)
    assert built == f"{pages} pages"
    assert 0.9 * room - 1 <= pages <= room
    assert asked == sorted(asked, reverse=True)
    assert len(asked) < 30


def test_less_than_one_request_is_no_pool() -> None:
    asked, build = allocator(99)
    with pytest.raises(MemoryPlanError, match="no memory for a KV cache of 100 pages"):
        allocate_pool(1000, 100, build)
    assert asked[-1] == 100


def test_all_ranks_take_the_same_pool() -> None:
    """Another rank has room for 700 pages, this one for all."""
    asked, build = allocator(1000)
    _, pages = allocate_pool(1000, 100, build, lambda fits: fits and asked[-1] <= 700)
    assert 600 < pages <= 700


def test_an_operators_small_pool_may_shrink_as_well() -> None:
    wish = PoolWish(16, MIB, 16 * 100, 256, 0, 0.5, on_cpu=False)
    assert least_pages(wish, 500) == 100
    assert least_pages(wish, 20) == memory.LEAST_PAGES


def config(folder: Path, **changes: Any) -> WorkerConfig:
    plain = {"model_path": str(folder), "device": "cpu", "dtype": "float32", "threads": 1, "max_total_tokens": 4096}
    return WorkerConfig(**{**plain, "max_running_requests": 8, **changes})  # type: ignore[arg-type]


def short_of_memory(monkeypatch: pytest.MonkeyPatch, room: int) -> list[int]:
    """Caches of more than `room` pages cannot be had; what was tried is in the list."""
    asked: list[int] = []
    create = KVCache.__init__

    def init(self: KVCache, num_layers: int, num_pages: int, *args: Any, **more: Any) -> None:
        asked.append(num_pages)
        if num_pages > room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        create(self, num_layers, num_pages, *args, **more)

    monkeypatch.setattr(KVCache, "__init__", init)
    return asked


def test_a_worker_starts_with_the_pages_there_is_memory_for(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = short_of_memory(monkeypatch, 150)
    started = start_engine(config(llama_folder))
    assert asked[0] == 256
    assert 100 < started.hello.num_pages <= 150
    assert started.engine.kv_cache.num_pages == started.hello.num_pages
    assert started.gauges["kv_bytes"] == started.hello.num_pages * started.hello.kv_bytes_per_page


def test_a_worker_without_memory_for_one_request_does_not_start(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short_of_memory(monkeypatch, 9)  # a request of 256 tokens needs 16
    with pytest.raises(MemoryPlanError, match="lower --context-length"):
        start_engine(config(llama_folder))


def test_weights_that_do_not_fit_are_said_in_one_sentence(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **more: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 224.00 MiB.")

    monkeypatch.setattr(startup, "load_model", load)
    with pytest.raises(MemoryPlanError, match="do not fit into cpu"):
        start_engine(config(llama_folder))


def test_the_culprit_is_found_and_the_size_comes_back() -> None:
    whole = StepSize(8192, 256)
    sizes = StepSizes(whole)
    assert sizes.after_fault(3000, 40, steps=10)
    assert sizes.now == StepSize(1500, 256)
    assert sizes.after_fault(90, 40, steps=11)
    assert sizes.now == StepSize(LEAST_TOKENS, 256)
    assert sizes.after_fault(40, 40, steps=12)
    assert sizes.now == StepSize(LEAST_TOKENS, 20)
    while sizes.now.slots > 1:
        assert sizes.after_fault(sizes.now.slots, sizes.now.slots, steps=13)
    assert sizes.after_fault(1, 1, steps=13)
    assert not sizes.after_fault(1, 1, steps=13)
    assert sizes.now == whole


def test_a_size_that_lasts_is_the_right_one() -> None:
    sizes = StepSizes(StepSize(8192, 256))
    assert sizes.after_fault(8192, 1, steps=5)
    assert sizes.after_fault(1, 1, steps=EPISODE_STEPS + 6)
    assert not sizes.after_fault(1, 1, steps=EPISODE_STEPS + 7)
    assert sizes.now == StepSize(4096, 256)


@settings(deadline=None)
@given(st.data())
def test_faults_come_to_an_end_whatever_fails(data: st.DataObject) -> None:
    """However the failing steps look within what was offered: few faults, never more than offered, never nothing."""
    whole = StepSize(data.draw(st.integers(1, 8192)), data.draw(st.integers(1, 512)))
    sizes = StepSizes(whole)
    for _ in range(64):
        rows = data.draw(st.integers(1, min(sizes.now.slots, sizes.now.tokens)))
        known = data.draw(st.integers(rows, sizes.now.tokens))
        if not sizes.after_fault(known, rows, steps=1):
            break
        assert 1 <= sizes.now.slots <= whole.slots
        assert min(LEAST_TOKENS, whole.tokens) <= sizes.now.tokens <= whole.tokens
    else:
        pytest.fail("no end")
    assert sizes.now == whole


async def test_the_next_hello_offers_less_and_says_that_nobody_is_to_blame(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    reset = stage.bench.engine.reset
    monkeypatch.setattr(stage.bench.engine, "reset", lambda: (done.append("reset"), reset()))
    monkeypatch.setattr(worker, "release_cached", lambda: done.append("memory is freed"))
    script = stage.script
    hello = await script.welcome()
    stage.bench.runner.error = torch.OutOfMemoryError("CUDA out of memory")
    script.step(
        opens=tuple(open_slot(slot, 3, [slot * 4]) for slot in range(3)),
        prefills=tuple(prefill(slot, PROMPT) for slot in range(3)),
    )
    fault = await script.next(WorkerFault)
    assert (fault.kind, fault.remedy) == ("oom", "smaller")
    stage.bench.runner.error = None
    script.send(WorkerReset(3, "fault"))
    again = await script.next(WorkerHello)
    while again.incarnation == hello.incarnation:
        again = await script.next(WorkerHello)
    assert (again.max_slots, again.max_batched_tokens) == (1, hello.max_batched_tokens)
    assert again.num_pages == hello.num_pages
    assert done == ["reset", "memory is freed"], "what steps under way hold is given up first"
    await script.welcome()
    script.open()
    assert tokens(await script.result()) == toy_greedy(PROMPT, 1)
