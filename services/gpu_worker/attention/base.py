"""The attention interface between models and the paged KV cache. Leaves layout and kernels to each backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from services.gpu_worker.batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one layer's attention needs beyond its inputs."""

    scale: float
    sliding_window: int = 0  # 0: none; w: a query at p sees positions p - w + 1 .. p
    soft_cap: float = 0.0  # 0: none; c: scores become c * tanh(score / c)


class AttentionBackend(Protocol):
    """Writes K and V of a step's tokens into the cache and attends over each row's pages."""

    @property
    def kv_bytes_read(self) -> int:
        """Bytes of K and V read from the cache so far, all layers together."""
        ...

    def plan(self, batch: ForwardBatch) -> None:
        """Once per step, before the layers; everything derived from the batch is computed here."""
        ...

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D], rope already applied; returns [T, Hq, D] in q's dtype.

        Stores k and v at the planned kv_slots first, then row r's tokens attend causally to
        positions 0 .. own position of row r's pages (within the sliding window).
        """
        ...


@runtime_checkable
class GraphAttention(AttentionBackend, Protocol):
    """A backend whose kernels can be captured into CUDA graphs."""

    def graph_backend(self, batch_size: int, max_pages: int) -> AttentionBackend:
        """A backend for batches of exactly `batch_size` decode rows of at most `max_pages` pages each.

        Its plan() only writes into fixed buffers, outside of the graph and as often as wanted between replays; its
        forward() may be captured. What it reads counts for this backend's `kv_bytes_read`.
        """
        ...
