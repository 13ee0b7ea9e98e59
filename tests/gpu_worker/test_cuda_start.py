"""Which engines get graphs, what memory is kept for them, and what is left where there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker.cuda.device import HostDevice
from services.gpu_worker.cuda.engine import PipelinedEngine
from services.gpu_worker.cuda.graphs import DecodeGraphs
from services.gpu_worker.cuda.start import ON_CPU, GraphPlan, graph_device
from services.gpu_worker.engine import Engine
from services.gpu_worker.memory import MIB
from services.gpu_worker.model_runner import LoadedModel
from services.gpu_worker.startup import start_engine
from shared.config import WorkerConfig
from tests.gpu_worker.test_cuda_graphs import PoisonedAttention
from tests.gpu_worker.tiny_models import load, save_model

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
PAGE = 16


def on(device: torch.device, loaded: LoadedModel) -> LoadedModel:
    return LoadedModel(loaded.config, loaded.model, device, "auto", loaded.kv_dtype)


def test_who_gets_graphs(llama_folder: Path, tmp_path: Path) -> None:
    loaded = load(llama_folder)
    config = WorkerConfig()
    assert GraphPlan.of(config, on(CUDA, loaded), 64).max_batch == 64
    assert GraphPlan.of(WorkerConfig(cuda_graph_max_bs=24), on(CUDA, loaded), 64).max_batch == 24
    assert GraphPlan.of(WorkerConfig(cuda_graph_max_bs=99), on(CUDA, loaded), 64).max_batch == 64
    assert GraphPlan.of(WorkerConfig(disable_cuda_graph=True), on(CUDA, loaded), 64).max_batch == 0
    assert GraphPlan.of(WorkerConfig(tp_size=2), on(CUDA, loaded), 64).max_batch == 0
    assert GraphPlan.of(config, loaded, 64).max_batch == 0
    assert not loaded.is_capturable  # its attention is the reference
    save_model("mixtral", tmp_path)  # experts in plain torch ask the host which of them have tokens
    assert GraphPlan.of(config, on(CUDA, load(tmp_path)), 64).max_batch == 0


def test_memory_is_kept_only_for_graphs_that_will_be(llama_folder: Path) -> None:
    config = load(llama_folder).config
    assert GraphPlan().reserve(config, PAGE, 4096) == 0
    assert GraphPlan().scratch_pages == 0
    small, large = (GraphPlan(rows).reserve(config, PAGE, 4096) for rows in (8, 256))
    assert 4 * 16 * MIB < small < 5 * 16 * MIB  # sizes 1, 2, 4, 8
    assert 35 * 16 * MIB < large < 36 * 16 * MIB
    assert GraphPlan(8).scratch_pages == 1


class Crowded(HostDevice):
    """A device whose memory is full."""

    def capture(self, work: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")


class Refusing(HostDevice):
    """A device on which a library takes no part in captures."""

    def capture(self, work: Any) -> Any:
        raise ValueError("this shape cannot be planned")


class Lost(Crowded):
    """A device whose context is gone."""

    def event(self) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_capturing_needs_attention_that_can_be_captured_and_memory(llama_folder: Path) -> None:
    plan, loaded = GraphPlan(4), load(llama_folder)
    runner = loaded.build_runner(8 + plan.scratch_pages, PAGE, 64)
    assert plan.capture(runner, HostDevice(), 8, PAGE, 0) is None
    runner.attention = PoisonedAttention(runner.kv_cache, PAGE)
    assert plan.capture(runner, Crowded(), 8, PAGE, 0) is None
    assert plan.capture(runner, Refusing(), 8, PAGE, 0) is None
    with pytest.raises(RuntimeError, match="illegal memory access"):
        plan.capture(runner, Lost(), 8, PAGE, 0)
    assert isinstance(plan.capture(runner, HostDevice(), 8, PAGE, 0), DecodeGraphs)


def test_a_cpu_executes_steps_in_one_piece_unless_a_test_asks(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ON_CPU, raising=False)
    assert graph_device(CPU) is None
    config = WorkerConfig(
        model_path=str(llama_folder), device="cpu", max_total_tokens=256, attention_backend="reference"
    )
    assert isinstance(start_engine(config).engine, Engine)
    monkeypatch.setenv(ON_CPU, "1")
    started = start_engine(config)
    assert isinstance(started.engine, PipelinedEngine)
    assert started.hello.num_pages == 16
    assert started.engine.kv_cache.num_pages == 16
