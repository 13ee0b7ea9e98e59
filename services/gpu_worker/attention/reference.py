"""Attention in plain torch: gathers each row's pages and accumulates in fp32. Slow, and the judge of all backends."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from services.gpu_worker.attention.base import AttentionSpec
from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.kv_cache import KVCache, as_bytes, to_fp8

QUERY_BLOCK = 64  # bounds the scores tensor of a long prefill


@dataclass(frozen=True, slots=True)
class _QueryBlock:
    """Consecutive tokens of one row: tokens start..stop of the batch, at positions first..last."""

    start: int
    stop: int
    first: int
    last: int
    page_table: torch.Tensor  # int64, the row's pages up to `last`


class ReferenceAttention:
    """An AttentionBackend. With `one_query` each token is computed alone, so sums never depend on its neighbours."""

    def __init__(self, kv_cache: KVCache, *, one_query: bool = False) -> None:
        self._cache = kv_cache
        self._block = 1 if one_query else QUERY_BLOCK
        self._blocks: list[_QueryBlock] = []
        self.kv_bytes_read = 0
        self._slot_pages = torch.empty(0, dtype=torch.int64)
        self._slot_offsets = torch.empty(0, dtype=torch.int64)

    def plan(self, batch: ForwardBatch) -> None:
        """Cut the rows into blocks of queries; table entries beyond a row's last position are never read."""
        size = self._cache.page_size
        self._slot_pages, self._slot_offsets = batch.kv_slots // size, batch.kv_slots % size
        starts, lengths = batch.qo_indptr.tolist(), batch.kv_lengths.tolist()
        self._blocks = []
        for row, (begin, end) in enumerate(itertools.pairwise(starts)):
            offset = lengths[row] - end  # position of a token minus its index in the batch
            for start in range(begin, end, self._block):
                stop = min(start + self._block, end)
                last = stop - 1 + offset
                table = batch.page_tables[row, : last // size + 1].long()
                self._blocks.append(_QueryBlock(start, stop, start + offset, last, table))

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """Shapes as in AttentionBackend."""
        cache, scales = self._cache.layers[layer], self._scales(layer)
        for index, values in enumerate((k, v)):
            stored = values if scales is None else to_fp8(values, scales[index])
            as_bytes(cache)[self._slot_pages, index, :, self._slot_offsets] = as_bytes(stored)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for block in self._blocks:
            out[block.start : block.stop] = self._attend(layer, q[block.start : block.stop], block, spec)
        return out

    def _scales(self, layer: int) -> list[float] | None:
        return None if self._cache.scales is None else self._cache.scales[layer].tolist()

    def _attend(self, layer: int, q: torch.Tensor, block: _QueryBlock, spec: AttentionSpec) -> torch.Tensor:
        cache, scales = self._cache.layers[layer], self._scales(layer)
        queries, heads, dim = q.shape
        kv_heads, size = cache.shape[2], cache.shape[3]
        lowest = max(block.first - spec.sliding_window + 1, 0) if spec.sliding_window else 0
        skipped = lowest // size  # pages wholly outside every query's window
        gathered = as_bytes(cache)[block.page_table[skipped:]].view(cache.dtype)
        self.kv_bytes_read += gathered.nbytes
        pages = gathered.float()
        if scales is not None:
            pages *= torch.tensor(scales, device=pages.device).view(2, 1, 1, 1)
        base = skipped * size  # position of the first key gathered
        length = block.last + 1 - base
        keys, values = (pages[:, i].transpose(0, 1).reshape(kv_heads, -1, dim)[:, :length] for i in (0, 1))
        grouped = q.float().reshape(queries, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)
        scores = grouped.reshape(kv_heads, -1, dim) @ keys.transpose(1, 2) * spec.scale
        scores = scores.view(kv_heads, -1, queries, length)
        if spec.soft_cap:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        scores = scores.masked_fill(~self._visible(block, base, spec, q.device), -torch.inf)
        weights = scores.softmax(-1).view(kv_heads, -1, length)
        mixed = (weights @ values).view(kv_heads, -1, queries, dim)
        return mixed.permute(2, 0, 1, 3).reshape(queries, heads, dim).to(q.dtype)

    @staticmethod
    def _visible(block: _QueryBlock, base: int, spec: AttentionSpec, device: torch.device) -> torch.Tensor:
        query_positions = torch.arange(block.first, block.last + 1, device=device)[:, None]
        key_positions = torch.arange(base, block.last + 1, device=device)[None, :]
        visible = key_positions <= query_positions
        if spec.sliding_window:
            visible &= key_positions > query_positions - spec.sliding_window
        return visible
