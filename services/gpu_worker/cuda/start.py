"""Whether and how an engine is driven in two halves. Leaves loading to `startup`."""

from __future__ import annotations

import os

import torch

from services.gpu_worker.cuda.device import CudaDevice, GraphDevice, HostDevice
from services.gpu_worker.cuda.engine import PipelinedEngine
from services.gpu_worker.engine import Engine
from services.gpu_worker.executor import StepEngine

ON_CPU = "RADIXFLEET_PIPELINED_ON_CPU"  # for tests: a CPU gains nothing by it


def graph_device(device: torch.device) -> GraphDevice | None:
    """None where a step is best executed in one piece."""
    if device.type == "cuda":
        return CudaDevice(device)
    return HostDevice() if os.environ.get(ON_CPU) else None


def split(engine: Engine, device: GraphDevice | None) -> StepEngine:
    """The engine in two halves on a GraphDevice, else as it is."""
    return engine if device is None else PipelinedEngine(engine, device)
