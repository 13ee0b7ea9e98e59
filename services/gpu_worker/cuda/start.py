"""Whether and how an engine is driven in two halves, and with which graphs. Leaves loading to `startup`.

Graphs are captured after the pool has been allocated, for they hold its addresses. So their memory is reserved by a
rule before the pool is sized, and what they have taken is compared with it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import structlog
import torch

from services.gpu_worker.attention.base import GraphAttention
from services.gpu_worker.cuda.device import CudaDevice, GraphDevice, HostDevice
from services.gpu_worker.cuda.engine import PipelinedEngine
from services.gpu_worker.cuda.graphs import DecodeGraphs, GraphShape, graph_sizes
from services.gpu_worker.engine import Engine
from services.gpu_worker.executor import StepEngine
from services.gpu_worker.memory import MIB, free_bytes
from services.gpu_worker.model_runner import LoadedModel, ModelRunner
from services.gpu_worker.models.config import ModelConfig
from shared.config import WorkerConfig

log = structlog.get_logger(__name__)

ON_CPU = "RADIXFLEET_PIPELINED_ON_CPU"  # for tests: a CPU gains nothing by it

BYTES_PER_GRAPH = 8 * MIB  # its nodes at the driver, and what does not come in whole blocks
BYTES_PER_PLAN = 8 * MIB  # an attention backend's plan, for each distinct spec
HIDDEN_STATES = 32  # tensors as wide as the hidden state that are alive at once, at most: the MLP's are several of them


def graph_device(device: torch.device) -> GraphDevice | None:
    """None where a step is best executed in one piece."""
    if device.type == "cuda":
        return CudaDevice(device)
    return HostDevice() if os.environ.get(ON_CPU) else None


def split(engine: Engine, device: GraphDevice | None, graphs: DecodeGraphs | None = None) -> StepEngine:
    """The engine in two halves on a GraphDevice, else as it is."""
    if device is None:
        return engine
    log.info("steps are launched ahead of results", device=str(device.device), graphs=graphs is not None)
    return PipelinedEngine(engine, device, graphs)


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """Whether there will be graphs, and what they need; made before the pool is sized."""

    max_batch: int = 0  # 0: none

    @staticmethod
    def of(config: WorkerConfig, model: LoadedModel, max_slots: int) -> GraphPlan:
        """No graphs on a CPU, over several ranks, for what cannot be captured, and where they are not wanted."""
        wanted = model.device.type == "cuda" and not config.disable_cuda_graph and config.tp_size == 1
        if not wanted or not model.is_capturable:
            return GraphPlan()
        return GraphPlan(min(config.cuda_graph_max_bs or max_slots, max_slots))

    @property
    def scratch_pages(self) -> int:
        """Pages of the cache beyond those the scheduler is told of."""
        return 1 if self.max_batch else 0

    def reserve(self, model: ModelConfig, page_size: int, bytes_per_page: int) -> int:
        """Bytes that the graphs and the scratch page will need, rather too many than too few."""
        if not self.max_batch:
            return 0
        sizes, item = graph_sizes(self.max_batch), model.dtype.itemsize
        max_pages = -(-model.max_context // page_size)
        tables = 4 * max_pages * (sum(sizes) + self.max_batch)
        plans = len(sizes) * (BYTES_PER_GRAPH + BYTES_PER_PLAN * len(set(model.attention)))
        logits = self.max_batch * model.vocab_size * (4 + 4 + item)  # kept, and those of the largest graph
        hidden = self.max_batch * model.hidden * item * HIDDEN_STATES
        return tables + plans + logits + hidden + bytes_per_page

    def capture(
        self, runner: ModelRunner, device: GraphDevice, num_pages: int, page_size: int, reserved: int
    ) -> DecodeGraphs | None:
        """All graphs, or None where there are to be none or capturing fails, which only costs speed.

        Raises what the device raises where it is lost for good.
        """
        if not self.max_batch:
            return None
        if not isinstance(runner.attention, GraphAttention):
            log.info("no CUDA graphs: this attention cannot be captured", attention=type(runner.attention).__name__)
            return None
        config = runner.config
        max_pages = -(-config.max_context // page_size)
        shape = GraphShape(self.max_batch, max_pages, page_size, num_pages, config.vocab_size, config.num_layers)
        began, before = time.monotonic(), free_bytes(device.device)
        try:
            graphs = DecodeGraphs(runner.model, runner.attention, shape, device)
            graphs.capture()
        except Exception as error:  # libraries within the capture raise what they like
            log.warning("no CUDA graphs: decode steps are launched kernel by kernel", reason=str(error))
            alive = device.event()
            alive.record()
            alive.wait()
            return None
        taken = max(0, before - free_bytes(device.device))
        log.info(
            "CUDA graphs captured",
            largest=self.max_batch,
            seconds=round(time.monotonic() - began, 2),
            mib=taken // MIB,
            reserved_mib=reserved // MIB,
        )
        if taken > reserved:
            log.warning("CUDA graphs took more memory than was reserved for them", mib=(taken - reserved) // MIB)
        return graphs
