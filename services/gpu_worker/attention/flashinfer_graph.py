"""Decode of a fixed number of rows through FlashInfer, for capture into a CUDA graph. Leaves capturing to the caller.

Groups are read row by row here: how a cascade is cut changes from step to step, while a graph always launches the same
kernels. A batch whose groups save more than a graph does is better run eagerly (`FlashInferAttention.cascade_gain`).
"""

from __future__ import annotations

import numpy as np
import torch

from services.gpu_worker.attention.base import AttentionSpec
from services.gpu_worker.attention.flashinfer_api import DecodeWrapper, FlashInferApi
from services.gpu_worker.attention.flashinfer_parts import (
    KeyCounter,
    Layers,
    PlanFence,
    PlannedPages,
    Shape,
    Writer,
    plan_options,
)
from services.gpu_worker.attention.page_lists import keys_read, page_lists
from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.kv_cache import KV_LAYOUT


class GraphDecode:
    """An AttentionBackend whose forward() reads nothing but its arguments, the cache and buffers that never move.

    specs: one a layer. Every captured graph is replayed after a plan() of its own.
    """

    def __init__(
        self,
        api: FlashInferApi,
        shape: Shape,
        layers: Layers,
        specs: tuple[AttentionSpec, ...],
        workspace: torch.Tensor,
        counter: KeyCounter,
        batch_size: int,
        max_pages: int,
    ) -> None:
        self._shape, self._layers, self._specs = shape, layers, specs
        self._counter, self._batch_size, self._max_pages = counter, batch_size, max_pages
        self._writer = Writer(api, shape, layers, batch_size)
        self._fence = PlanFence(shape.device)
        sizes = (batch_size + 1, batch_size * max_pages, batch_size)
        # All wrappers are planned over the same rows, so they share these.
        buffers = [torch.zeros(size, dtype=torch.int32, device=shape.device) for size in sizes]
        self._wrappers: dict[AttentionSpec, DecodeWrapper] = {
            spec: api.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                KV_LAYOUT,
                use_cuda_graph=True,
                use_tensor_cores=shape.tensor_cores,
                paged_kv_indptr_buffer=buffers[0],
                paged_kv_indices_buffer=buffers[1],
                paged_kv_last_page_len_buffer=buffers[2],
            )
            for spec in dict.fromkeys(specs)
        }

    @property
    def kv_bytes_read(self) -> int:
        """As the backend's this one was made by."""
        return self._counter.bytes

    def plan(self, batch: ForwardBatch) -> None:
        """Raises ValueError for anything but batch_size decode rows of at most max_pages pages."""
        host, shape = batch.host_columns(), self._shape
        if batch.num_rows != self._batch_size or batch.num_decode_rows != self._batch_size:
            raise ValueError(f"a graph of {self._batch_size} decode rows was planned for {batch.num_rows} rows")
        lists = page_lists(host.page_tables, host.kv_lengths, shape.page_size)
        if int(np.diff(lists.indptr).max()) > self._max_pages:
            raise ValueError(f"a graph for at most {self._max_pages} pages a row was planned for more")
        self._fence.wait()
        self._writer.plan(batch.kv_slots)
        pages = PlannedPages.of(lists, shape.device)
        for spec, wrapper in self._wrappers.items():
            wrapper.plan(
                pages.indptr,
                pages.indices,
                pages.last_page_len,
                *shape.heads,
                **plan_options(shape, spec),
            )
        self._fence.record()
        # A replay calls nothing of this, so what it will read is counted here.
        ones = np.ones_like(host.kv_lengths)
        keys = sum(keys_read(ones, host.kv_lengths, spec.sliding_window) for spec in self._specs)
        self._counter.bytes += keys * shape.bytes_per_key

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """As AttentionBackend.forward, of batch_size tokens."""
        self._writer.write(layer, k, v)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        k_scale, v_scale = self._layers.scales(layer)
        self._wrappers[spec].run(q, self._layers[layer], k_scale=k_scale, v_scale=v_scale, out=out, return_lse=False)
        return out
