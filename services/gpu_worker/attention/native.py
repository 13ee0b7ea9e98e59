"""Attention through the worker's own CPU kernels. Leaves arithmetic to kernels/src, fallback to the caller.

A query's result depends on its position and keys alone: not on the other rows, the chunking of its prompt, decode or
prefill, or the number of threads. So it is the same, bit by bit, alone, in any batch and after a resume. Groups of
rows that share pages keep that only as far as whole blocks of keys are shared, and are cut to these when asked. The
kernels read one level of groups; of nested ones those that save most.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from services.gpu_worker.attention.base import AttentionBackend, AttentionSpec
from services.gpu_worker.attention.nested_groups import one_level
from services.gpu_worker.batch import ForwardBatch, SharedGroup
from services.gpu_worker.kernels import NativeUnavailable, library
from services.gpu_worker.kernels.library import DTYPES, LayerCall, Library
from services.gpu_worker.kernels.pages import PageCopier
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.models.config import ModelConfig

__all__ = ["NativeAttention", "NativeUnavailable", "load"]

_NO_GROUPS = (torch.empty(0, dtype=torch.int32),) * 3
_PLAN_ERRORS = {
    -1: "no memory for scratch",
    1: "head counts, head size or page size do not fit",
    2: "qo_indptr and kv_lengths disagree",
    3: "a page table entry is not a page of the cache",
    4: "a KV slot is not in the cache",
}


def load(kv_cache: KVCache, config: ModelConfig) -> AttentionBackend:
    """The native backend over `kv_cache`. Raises NativeUnavailable where it cannot run."""
    kernels = library.load()
    exact = config.deterministic or kv_cache.layers[0].dtype == torch.float32
    attention = NativeAttention(kv_cache, kernels, exact_groups=exact)
    kv_cache.page_copier = PageCopier(kernels, kv_cache.layers)
    return attention


class NativeAttention:
    """AttentionBackend over a CPU cache of fp32 or bf16.

    Decode rows of a group read its shared pages once. exact_groups: only as far as no bit changes by it.
    """

    def __init__(self, kv_cache: KVCache, kernels: Library, *, exact_groups: bool = False) -> None:
        layer = kv_cache.layers[0]
        if layer.device.type != "cpu" or layer.dtype not in DTYPES:
            raise NativeUnavailable(f"no native attention for {layer.dtype} on {layer.device.type}")
        self._layers = kv_cache.layers
        self._num_pages, _, self._kv_heads, self._page_size, self._head_dim = layer.shape
        self._dtype = layer.dtype
        self._kernels = kernels
        self._exact_groups = exact_groups
        self._run = kernels.functions.rf_attention
        self._plan = ctypes.c_void_p(kernels.functions.rf_plan_new())
        self._batch: ForwardBatch | None = None
        self._arrays: tuple[torch.Tensor, ...] = ()
        self._planned_heads = 0
        self._call = LayerCall()

    def __del__(self) -> None:
        if getattr(self, "_plan", None):
            self._kernels.functions.rf_plan_free(self._plan)

    @property
    def kv_bytes_read(self) -> int:
        """Bytes of K and V read from the cache so far, all layers together."""
        return int(self._kernels.functions.rf_plan_kv_bytes(self._plan))

    def plan(self, batch: ForwardBatch) -> None:
        """Takes the step's batch; the cutting into work items follows with the first layer, which knows the heads."""
        self._batch = batch
        self._planned_heads = 0

    def prepared(self, q_heads: int) -> ctypes.c_void_p:
        """The step's plan for kernels that run attention among other things."""
        if self._planned_heads != q_heads:
            self._make_plan(q_heads)
        return self._plan

    @property
    def planned_tokens(self) -> int:
        return self._arrays[3].shape[0]

    @property
    def caches(self) -> list[torch.Tensor]:
        """The layers' K and V, as in KVCache."""
        return self._layers

    def _make_plan(self, q_heads: int) -> None:
        batch = self._batch
        if batch is None:
            raise RuntimeError("forward before plan")
        chosen = one_level(batch.groups)
        arrays = (
            contiguous(batch.qo_indptr, torch.int32),
            contiguous(batch.kv_lengths, torch.int32),
            contiguous(batch.page_tables, torch.int32),
            contiguous(batch.kv_slots, torch.int64),
            *_group_arrays(chosen),
        )
        indptr, lengths, tables, slots, *groups = arrays
        wrong = self._kernels.functions.rf_plan_make(
            self._plan,
            indptr.data_ptr(),
            lengths.data_ptr(),
            tables.data_ptr(),
            tables.shape[1],
            slots.data_ptr(),
            batch.num_rows,
            batch.num_tokens,
            q_heads,
            self._kv_heads,
            self._head_dim,
            self._page_size,
            self._num_pages,
            DTYPES[self._dtype],
            torch.get_num_threads(),
            *(array.data_ptr() for array in groups),
            len(chosen),
            self._exact_groups,
        )
        if wrong:
            raise ValueError(f"attention plan: {_PLAN_ERRORS[wrong]}")
        self._arrays = arrays  # the plan points into them
        self._planned_heads = q_heads

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """As AttentionBackend.forward; q, k and v may be slices of one fused tensor (strided over tokens)."""
        self.prepared(q.shape[1])
        tokens = self.planned_tokens
        if q.shape[0] != tokens or q.shape[2] != self._head_dim or k.shape != v.shape:
            raise ValueError(f"attention inputs {tuple(q.shape)}, {tuple(k.shape)} do not fit the batch")
        if k.shape != (tokens, self._kv_heads, self._head_dim) or spec.scale <= 0:
            raise ValueError(f"K and V {tuple(k.shape)} do not fit the cache, or scale {spec.scale} is not positive")
        q, k, v = _rows(q, self._dtype), _rows(k, self._dtype), _rows(v, self._dtype)
        out = torch.empty(q.shape, dtype=q.dtype)
        call = self._call
        call.q, call.k, call.v, call.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        call.cache = self._layers[layer].data_ptr()
        call.q_stride, call.k_stride, call.v_stride = q.stride(0), k.stride(0), v.stride(0)
        call.out_stride = out.stride(0)
        call.scale, call.soft_cap, call.window = spec.scale, spec.soft_cap, spec.sliding_window
        self._run(self._kernels.isa_id, self._plan, ctypes.byref(call))
        return out


def _group_arrays(groups: Sequence[SharedGroup]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """All groups' rows one after the other, their numbers of rows and of pages; int32."""
    if not groups:
        return _NO_GROUPS
    rows = [group.rows.to(torch.int32) for group in groups]
    return (
        torch.cat(rows),
        torch.tensor([len(r) for r in rows], dtype=torch.int32),
        torch.tensor([group.num_pages for group in groups], dtype=torch.int32),
    )


def contiguous(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """For a kernel, the tensor itself where it is so already: even to ask torch for nothing costs time in each step."""
    return tensor if tensor.dtype == dtype and tensor.is_contiguous() else tensor.to(dtype).contiguous()


def _rows(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor itself when each token's heads lie next to each other in the cache's dtype, else a copy."""
    if tensor.dtype == dtype and tensor.stride(2) == 1 and tensor.stride(1) == tensor.shape[2]:
        return tensor
    return tensor.to(dtype).contiguous()
