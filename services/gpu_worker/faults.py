"""The ways a step can fail: as a whole (a fault) or in one row; leaves the reaction to the worker and the scheduler."""

from __future__ import annotations

import errno
import re

import torch

from services.gpu_worker.parallel.group import GroupBroken
from shared.messages.step import FaultKind


class ProtocolError(Exception):
    """A command breaks the step protocol; executing it could touch memory that is not the slot's."""


class StepAborted(Exception):
    """The step was given up from outside (reset, shutdown); it has no result."""


_DEVICE_ERROR: tuple[type[BaseException], ...] = (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
"""Older ones raise a RuntimeError for the same."""
_NO_MEMORY = re.compile(r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)
_DEVICE = re.compile(
    r"\bcuda( runtime| driver)? error|\bcudaError|CUBLAS_STATUS_|CUDNN_STATUS_(EXECUTION|INTERNAL)|"
    r"illegal memory access|device-side assert|unspecified launch failure",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short and nothing else is wrong: the device's context lives on."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.search(str(error)) is not None


def classify(error: BaseException) -> FaultKind:
    """The kind of fault an exception out of a step is.

    A broken group goes first: whatever broke it, also a lack of memory, its ranks no longer agree.
    """
    if isinstance(error, ProtocolError):
        return "protocol"
    if isinstance(error, GroupBroken) or "NCCL" in str(error):
        return "nccl"
    if is_out_of_memory(error):
        return "oom"
    if isinstance(error, _DEVICE_ERROR) or _DEVICE.search(str(error)):
        return "cuda"
    return "internal"
