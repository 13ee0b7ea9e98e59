"""The ways a step can fail: as a whole (a fault) or in one row; leaves the reaction to the worker and the scheduler."""

from __future__ import annotations

import torch

from services.gpu_worker.parallel.group import GroupBroken
from shared.messages.step import FaultKind


class ProtocolError(Exception):
    """A command breaks the step protocol; executing it could touch memory that is not the slot's."""


class StepAborted(Exception):
    """The step was given up from outside (reset, shutdown); it has no result."""


def classify(error: BaseException) -> FaultKind:
    """The kind of fault an exception out of a step is."""
    if isinstance(error, ProtocolError):
        return "protocol"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        return "oom"
    if isinstance(error, GroupBroken) or "NCCL" in str(error):
        return "nccl"
    if isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error):
        return "cuda"
    return "internal"
