"""The paged K/V tensors of one worker and the copying of pages. Leaves which page is whose to the scheduler."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable

import torch

KV_LAYOUT = "HND"


class KVCache:
    """`layers[l]` is [num_pages, 2, kv_heads, page_size, head_dim]; index 0 of the second axis is K, 1 is V."""

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (num_pages, 2, kv_heads, page_size, head_dim)
        self.layers = [_zeros(shape, dtype, device) for _ in range(num_layers)]
        self.page_copier: Callable[[torch.Tensor, torch.Tensor], None] | None = None  # a backend's faster copy_pages

    @staticmethod
    def bytes_per_page(num_layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return num_layers * 2 * kv_heads * page_size * head_dim * dtype.itemsize

    def copy_pages(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole pages, int64 [n] each; all sources are read before any target is written."""
        if self.page_copier is not None:
            return self.page_copier(sources, targets)
        for layer in self.layers:
            layer[targets] = layer[sources]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros would write, and so occupy, gigabytes that most runs never use; fresh pages of the system are zero.
    size = max(1, math.prod(shape)) * dtype.itemsize
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a system without huge pages only loses some speed
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)
