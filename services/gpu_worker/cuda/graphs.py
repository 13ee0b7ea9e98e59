"""Decode steps as CUDA graphs, one per batch size. Leaves everything but decode rows to the eager forward."""

from __future__ import annotations

from typing import Protocol

import torch

from services.gpu_worker.batch import ForwardBatch


class DecodeGraphs(Protocol):
    """Graphs that may fit a batch."""

    @property
    def kv_bytes_read(self) -> int: ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor | None:
        """float32 logits, valid until the next call; None where no graph fits."""
        ...
