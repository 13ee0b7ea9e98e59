"""The paged K/V tensors of one worker and the copying of pages. Leaves which page is whose to the scheduler.

In 8 bits (e4m3) a layer's K and V have a scale each: what is stored, times the scale, is what was meant. What does not
fit is stored as the largest number that does; the format itself would make it NaN.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence

import torch

from services.gpu_worker import huge_memory

KV_LAYOUT = "HND"
FP8 = torch.float8_e4m3fn
FP8_LIMIT = float(torch.finfo(FP8).max)
TOUCHED_BYTES = 256 << 20
"""Of the pages given out first, over all layers: on CPUs the system clears them at the start, not within a step."""

Scales = Sequence[tuple[float, float]]
"""Of K and V, per layer."""


class KVCache:
    """`layers[l]` is [num_pages, 2, kv_heads, page_size, head_dim]; index 0 of the second axis is K, 1 is V.

    `scales`: fp32 [num_layers, 2] on the host, for a cache of 8 bits; else None.
    `hidden` [num_pages, hidden]: one token's state behind the last layer for each page, where they are kept; else None.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: Scales = (),
        hidden: int = 0,
    ) -> None:
        """`hidden`: the size of the states to keep; 0 keeps none."""
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (num_pages, 2, kv_heads, page_size, head_dim)
        touched = TOUCHED_BYTES // max(1, num_layers)
        self.layers = [_zeros(shape, dtype, device, touched) for _ in range(num_layers)]
        self.scales = torch.tensor(scales or [(1.0, 1.0)] * num_layers) if dtype == FP8 else None
        self.hidden = _zeros((num_pages, hidden), dtype, device, 0) if hidden else None
        self.page_copier: Callable[[torch.Tensor, torch.Tensor], None] | None = None  # a backend's faster copy_pages

    @staticmethod
    def bytes_per_page(num_layers: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return num_layers * 2 * kv_heads * page_size * head_dim * dtype.itemsize

    def copy_pages(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copy whole pages, int64 [n] each; all sources are read before any target is written."""
        if self.hidden is not None:
            self.hidden[targets] = self.hidden[sources]
        if self.page_copier is not None:
            return self.page_copier(sources, targets)
        for layer in self.layers:
            pages = as_bytes(layer)
            pages[targets] = pages[sources]

    @property
    def format(self) -> str:
        """What a page's bytes mean beyond its shape; pages only go where it is the same."""
        return kv_format(self.layers[0].dtype, [] if self.scales is None else self.scales.tolist())


def kv_format(dtype: torch.dtype, scales: Scales = ()) -> str:
    """The dtype's name; for scaled values with a checksum of the scales, unless all are 1."""
    name = str(dtype).removeprefix("torch.")
    if dtype != FP8 or all(scale == 1.0 for pair in scales for scale in pair):
        return name
    return f"{name}/{zlib.crc32(torch.tensor(scales).numpy().tobytes()):08x}"


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory for copying: not all operations know numbers of 8 bits."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def to_fp8(values: torch.Tensor, scale: float | torch.Tensor) -> torch.Tensor:
    """values / scale in 8 bits, a tensor of scales as it broadcasts; what is too large becomes the largest number."""
    return (values.float() / scale).clamp(-FP8_LIMIT, FP8_LIMIT).to(FP8)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, touched: int) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros would write, and so occupy, gigabytes that most runs never use; fresh pages of the system are zero.
    return huge_memory.zeros(math.prod(shape) * dtype.itemsize, touched).view(dtype).view(shape)
