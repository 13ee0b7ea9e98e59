"""What FlashInfer's eager and captured backends share: shapes, scales, uploads, writing K and V, the fence of plans."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.attention.base import AttentionSpec
from services.gpu_worker.attention.flashinfer_api import FlashInferApi
from services.gpu_worker.attention.page_lists import PageSpans
from services.gpu_worker.kv_cache import KV_LAYOUT, KVCache, to_fp8
from services.gpu_worker.models.config import ModelConfig

CUDA_CORE_GROUPS = frozenset({1, 2, 3})
"""Query heads per key head up to which decode reads faster than tensor cores could; beyond, only some are built."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What every plan and every wrapper is told."""

    q_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, kv_cache: KVCache, config: ModelConfig) -> Shape:
        layer = kv_cache.layers[0]
        _, _, kv_heads, page_size, head_dim = layer.shape
        return cls(config.num_heads, kv_heads, head_dim, page_size, config.dtype, layer.dtype, layer.device)

    @property
    def tensor_cores(self) -> bool:
        """Whether decode runs as a prefill of one query: query heads of a group then fill a tile of the product."""
        return self.q_heads // self.kv_heads not in CUDA_CORE_GROUPS

    @property
    def bytes_per_key(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.kv_dtype.itemsize

    @property
    def bytes_per_row(self) -> int:
        """The output of one query and its log-sum-exps."""
        return self.q_heads * (self.head_dim * self.q_dtype.itemsize + 4)

    @property
    def heads(self) -> tuple[int, int, int, int]:
        """As plans take them."""
        return self.q_heads, self.kv_heads, self.head_dim, self.page_size


class PlanOptions(TypedDict):
    """Keywords that decode and prefill plans share."""

    window_left: int
    logits_soft_cap: float
    q_data_type: torch.dtype
    kv_data_type: torch.dtype
    sm_scale: float


def plan_options(shape: Shape, spec: AttentionSpec) -> PlanOptions:
    """All of them, since FlashInfer's own defaults are float16 and no window."""
    return {
        "window_left": spec.sliding_window - 1 if spec.sliding_window else -1,
        "logits_soft_cap": spec.soft_cap,
        "q_data_type": shape.q_dtype,
        "kv_data_type": shape.kv_dtype,
        "sm_scale": spec.scale,
    }


class KeyCounter:
    """Bytes of K and V read from the cache; all backends over one cache count in one."""

    def __init__(self) -> None:
        self.bytes = 0


class Layers:
    """The layers' caches with their scales, as numbers of the host: the kernels take them by value."""

    def __init__(self, kv_cache: KVCache) -> None:
        self._kv_cache = kv_cache

    def __getitem__(self, layer: int) -> torch.Tensor:
        return self._kv_cache.layers[layer]

    @cached_property
    def _scales(self) -> list[list[float]] | None:
        scales = self._kv_cache.scales
        return None if scales is None else scales.tolist()

    def scales(self, layer: int) -> tuple[float | None, float | None]:
        """Of K and of V: what was stored, times these, is what was meant."""
        if self._scales is None:
            return None, None
        k_scale, v_scale = self._scales[layer]
        return k_scale, v_scale


class Writer:
    """Stores a step's K and V at its kv_slots.

    Each token is given to the kernel as a row of one page in which it has its offset, so that nothing but kv_slots is
    needed. With `capacity` the buffers are fixed, for batches of exactly so many tokens.
    """

    def __init__(self, api: FlashInferApi, shape: Shape, layers: Layers, capacity: int = 0) -> None:
        self._api, self._shape, self._layers = api, shape, layers
        self._fixed = capacity
        self._ordinals = torch.arange(capacity + 1, dtype=torch.int32, device=shape.device)
        self._pages, self._offsets, self._lengths = self._empty(capacity)

    def _empty(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        empty = torch.zeros((3, size), dtype=torch.int32, device=self._shape.device)
        return empty[0], empty[1], empty[2]

    def plan(self, kv_slots: torch.Tensor) -> None:
        """kv_slots int64 [T]."""
        size, count = self._shape.page_size, kv_slots.shape[0]
        if not self._fixed:
            if len(self._ordinals) <= count:
                self._ordinals = torch.arange(2 * count + 1, dtype=torch.int32, device=self._shape.device)
            self._pages, self._offsets, self._lengths = self._empty(count)
        self._pages.copy_(kv_slots // size)
        self._offsets.copy_(kv_slots % size)
        torch.add(self._offsets, 1, out=self._lengths)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """k and v [T, Hkv, D]."""
        k_scale, v_scale = self._layers.scales(layer)
        count = len(self._pages)
        self._api.append_paged_kv_cache(
            self._stored(k, k_scale),
            self._stored(v, v_scale),
            self._ordinals[:count],
            self._offsets,
            self._layers[layer],
            self._pages,
            self._ordinals[: count + 1],
            self._lengths,
            KV_LAYOUT,
        )

    def _stored(self, values: torch.Tensor, scale: float | None) -> torch.Tensor:
        values = values.to(self._shape.kv_dtype) if scale is None else to_fp8(values, scale)
        return values if values.stride(2) == 1 else values.contiguous()


@dataclass(frozen=True, slots=True)
class PlannedPages:
    """PageSpans as tensors: ends and lengths stay on the host, where planning reads them, page ids are on the device.

    No plan that this worker makes copies the ids back: of 0.7.4 only cuDNN's decode does, which `import_flashinfer`
    keeps "auto" from.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor

    @classmethod
    def gathered(cls, spans: PageSpans, tables: torch.Tensor) -> PlannedPages:
        """With ids from tables int32 [R, P] that are on the device: what goes up does not grow with the pages."""
        device = tables.device
        return cls(pinned(spans.indptr, device), gather_pages(spans, tables), pinned(spans.last_page_len, device))


def gather_pages(spans: PageSpans, tables: torch.Tensor) -> torch.Tensor:
    """As `spans.pages`, int32 on the device of the tables [R, P], and without waiting for it.

    span    0 0 1 1 1     place in the table  =  base[span] + ordinal
    ordinal 0 1 2 3 4     base                =  row * P + start - indptr
    """
    bases = spans.rows * tables.shape[1] + spans.starts - spans.indptr[:-1]
    sent = upload(np.stack([np.diff(spans.indptr).astype(np.int64), bases]), tables.device)
    # With its size given, nobody has to ask the device for the sum of the counts.
    owners = torch.repeat_interleave(sent[0], output_size=spans.num_pages)
    places = sent[1].index_select(0, owners)
    places += torch.arange(spans.num_pages, device=tables.device)
    return tables.reshape(-1).index_select(0, places)


def pinned(values: NDArray[np.int32] | NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """A tensor of the host that copies to `device` without anybody waiting."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.pin_memory() if device.type == "cuda" else tensor


def upload(values: NDArray[np.int32] | NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """The values on `device`, in the order of its stream."""
    return pinned(values, device).to(device, non_blocking=True)


class PlanFence:
    """Keeps a plan from overwriting what the one before has not yet copied up.

    A wrapper computes its plan in one pinned buffer of its own and copies that in the order of the stream. While the
    device is a step behind, the copy of the last plan may still wait: the next plan waits for it, with that step's
    kernels queued behind it, so the device does not idle.
    """

    def __init__(self, device: torch.device) -> None:
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()  # at once where nothing was recorded yet

    def record(self) -> None:
        if self._event is not None:
            self._event.record()
