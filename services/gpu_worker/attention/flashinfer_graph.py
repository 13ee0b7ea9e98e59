"""Decode of a fixed number of rows through FlashInfer, for capture into a CUDA graph. Leaves capturing to the caller.

Groups are read row by row here: how a cascade is cut changes from step to step, while a graph always launches the same
kernels. A batch whose groups save more than a graph does is better run eagerly (`FlashInferAttention.cascade_gain`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

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
from services.gpu_worker.attention.page_lists import keys_read, page_spans
from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.kv_cache import KV_LAYOUT


@dataclass(frozen=True, slots=True)
class IndexBuffers:
    """Where plans put the rows' page lists. Graphs of all sizes read the beginning of one set, each after its plan."""

    indptr: torch.Tensor  # int32 [rows + 1]
    indices: torch.Tensor  # int32 [pages of all rows]
    last_page_len: torch.Tensor  # int32 [rows]

    @classmethod
    def empty(cls, rows: int, pages: int, device: torch.device) -> IndexBuffers:
        sizes = (rows + 1, pages, rows)
        return cls(*(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes))

    def holds(self, rows: int, pages: int) -> bool:
        return len(self.last_page_len) >= rows and len(self.indices) >= pages

    def part(self, rows: int, pages: int) -> IndexBuffers:
        return IndexBuffers(self.indptr[: rows + 1], self.indices[:pages], self.last_page_len[:rows])


class GraphDecode:
    """An AttentionBackend whose forward() reads nothing but its arguments, the cache and buffers that never move.

    specs: one a layer. buffers: for exactly the graph's rows. Every graph is replayed after a plan() of its own.
    """

    def __init__(
        self,
        api: FlashInferApi,
        shape: Shape,
        layers: Layers,
        specs: tuple[AttentionSpec, ...],
        workspace: torch.Tensor,
        counter: KeyCounter,
        buffers: IndexBuffers,
    ) -> None:
        batch_size = len(buffers.last_page_len)
        self._shape, self._layers, self._layers_of = shape, layers, Counter(specs)
        self._counter, self._batch_size = counter, batch_size
        self._max_pages = len(buffers.indices) // batch_size
        self._writer = Writer(api, shape, layers, batch_size)
        self._fence = PlanFence(shape.device)
        self._wrappers: dict[AttentionSpec, DecodeWrapper] = {
            spec: api.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                KV_LAYOUT,
                use_cuda_graph=True,
                use_tensor_cores=shape.tensor_cores,
                paged_kv_indptr_buffer=buffers.indptr,
                paged_kv_indices_buffer=buffers.indices,
                paged_kv_last_page_len_buffer=buffers.last_page_len,
            )
            for spec in self._layers_of
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
        spans = page_spans(host.kv_lengths, shape.page_size, batch.page_tables.shape[1])
        if int(np.diff(spans.indptr).max()) > self._max_pages:
            raise ValueError(f"a graph for at most {self._max_pages} pages a row was planned for more")
        self._fence.wait()
        self._writer.plan(batch.kv_slots)
        pages = PlannedPages.gathered(spans, batch.page_tables)
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
        keys = sum(
            layers * keys_read(ones, host.kv_lengths, spec.sliding_window) for spec, layers in self._layers_of.items()
        )
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
