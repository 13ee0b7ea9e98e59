"""Decode steps as CUDA graphs, one per batch size. Leaves prefills, and groups worth a cascade, to the eager forward.

A replay reads the same memory each time: inputs are copied there, and a batch is filled up to the graph's size with
rows that read and write one *scratch page*, which lies beyond the pages the scheduler knows. Their logits are dropped.

    size 4, 3 rows    token_ids  a b c 0    kv_lengths  17 40 9 1    page_tables  [..] [..] [..] [scratch]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import structlog
import torch

from services.gpu_worker.attention.base import AttentionBackend, AttentionSpec, GraphAttention
from services.gpu_worker.batch import ForwardBatch, HostColumns
from services.gpu_worker.cuda.device import Graph, GraphDevice

log = structlog.get_logger(__name__)

SMALL_SIZES = (1, 2, 4)
SIZE_STEP = 8
EAGER_BYTES_PER_LAYER = 180_000_000
"""What a cascade must save in each layer to be worth an eager step: some 15 kernels that are launched one by one, 4 us
each, in which a card of 3 TB/s reads 180 MB. An estimate, meant to be corrected by measurements."""
LOG_EVERY = 8


class GraphModel(Protocol):
    """What is captured."""

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor: ...


@runtime_checkable
class CascadeAttention(Protocol):
    """A backend that reads shared prefixes once, but only in eager steps."""

    def cascade_gain(self, batch: ForwardBatch) -> int:
        """Bytes a step reads less by it, over all layers."""
        ...


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What bounds the buffers."""

    max_batch: int
    max_pages: int  # of one row
    page_size: int
    scratch_page: int
    vocab_size: int
    num_layers: int


def graph_sizes(max_batch: int) -> list[int]:
    """1, 2, 4, 8, 16, 24, 32, ... and `max_batch` itself, ascending."""
    sizes = {*SMALL_SIZES, *range(SIZE_STEP, max_batch + 1, SIZE_STEP), max_batch}
    return sorted(size for size in sizes if size <= max_batch)


class StaticInputs:
    """The memory all graphs read; a smaller graph reads the beginning of it. Rows that are not in use are padding."""

    def __init__(self, shape: GraphShape, device: torch.device) -> None:
        rows, self._shape = shape.max_batch, shape
        scratch = shape.scratch_page
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._lengths = torch.ones(rows, dtype=torch.int32, device=device)
        self._slots = torch.full((rows,), scratch * shape.page_size, dtype=torch.int64, device=device)
        self._tables = torch.full((rows, shape.max_pages), scratch, dtype=torch.int32, device=device)
        self._indptr = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(rows, dtype=torch.int64, device=device)
        self._used = 0

    def batch(self, size: int, host: HostColumns) -> ForwardBatch:
        """The first `size` rows."""
        return ForwardBatch(
            token_ids=self._tokens[:size],
            positions=self._positions[:size],
            qo_indptr=self._indptr[: size + 1],
            kv_lengths=self._lengths[:size],
            page_tables=self._tables[:size],
            kv_slots=self._slots[:size],
            logit_rows=self._rows[:size],
            num_decode_rows=size,
            host=host,
        )

    def fill(self, batch: ForwardBatch) -> None:
        """The batch's rows, then padding wherever the last batch had rows."""
        count, width = batch.num_rows, batch.page_tables.shape[1]
        self._tokens[:count].copy_(batch.token_ids)
        self._positions[:count].copy_(batch.positions)
        self._lengths[:count].copy_(batch.kv_lengths)
        self._slots[:count].copy_(batch.kv_slots)
        self._tables[:count, :width].copy_(batch.page_tables)
        if count < self._used:
            rest = slice(count, self._used)
            self._tokens[rest] = 0
            self._positions[rest] = 0
            self._lengths[rest] = 1
            self._slots[rest] = self._shape.scratch_page * self._shape.page_size
            self._tables[rest] = self._shape.scratch_page
        self._used = count

    def host(self, columns: HostColumns | None, size: int) -> HostColumns:
        """The batch's columns with padding up to `size` rows; None: nothing but padding."""
        lengths = np.ones(size, dtype=np.int32)
        if columns is not None:
            lengths[: len(columns.kv_lengths)] = columns.kv_lengths
        return HostColumns(np.arange(size + 1, dtype=np.int32), lengths, self._shape.max_pages)


@dataclass(frozen=True, slots=True)
class _Captured:
    size: int
    graph: Graph
    attention: AttentionBackend


class DecodeGraphs:
    """Graphs over one model and cache. For the thread that runs the model."""

    def __init__(self, model: GraphModel, attention: AttentionBackend, shape: GraphShape, device: GraphDevice) -> None:
        if not isinstance(attention, GraphAttention):
            raise TypeError(f"{type(attention).__name__} cannot be captured")
        self._model, self._attention, self._shape, self._device = model, attention, shape, device
        self._inputs = StaticInputs(shape, device.device)
        # One for all graphs: each would keep its own logits else.
        self._logits = torch.zeros((shape.max_batch, shape.vocab_size), dtype=torch.float32, device=device.device)
        self._graphs: list[_Captured] = []

    @torch.inference_mode()
    def capture(self, sizes: Iterable[int] | None = None) -> None:
        """Capture all sizes, the largest first, so that the others find its memory. Raises what the model raises."""
        wanted = sorted(graph_sizes(self._shape.max_batch) if sizes is None else sizes, reverse=True)
        for done, size in enumerate(wanted):
            if done % LOG_EVERY == 0:
                log.info("capturing CUDA graphs", rows=size, done=done, of=len(wanted))
            self._graphs.append(self._capture(size))
        self._graphs.reverse()

    def forward(self, batch: ForwardBatch) -> torch.Tensor | None:
        """float32 logits, valid until the next call; None where no graph fits or an eager step is better."""
        captured = self._fitting(batch)
        if captured is None:
            return None
        self._inputs.fill(batch)
        host = self._inputs.host(batch.host_columns(), captured.size)
        captured.attention.plan(self._inputs.batch(captured.size, host))
        captured.graph.replay()
        return self._logits[: batch.num_rows]

    def _fitting(self, batch: ForwardBatch) -> _Captured | None:
        rows = batch.num_rows
        if batch.num_decode_rows != rows or len(batch.logit_rows) != rows:
            return None
        found = next((captured for captured in self._graphs if captured.size >= rows), None)
        if found is None or not batch.groups or not isinstance(self._attention, CascadeAttention):
            return found
        worth = self._shape.num_layers * EAGER_BYTES_PER_LAYER
        return None if self._attention.cascade_gain(batch) > worth else found

    def _capture(self, size: int) -> _Captured:
        attention = self._attention.graph_backend(size, self._shape.max_pages)
        batch = self._inputs.batch(size, self._inputs.host(None, size))
        attention.plan(batch)
        planned, logits = _Planned(attention), self._logits[:size]

        def work() -> torch.Tensor:
            return logits.copy_(self._model.forward(batch, planned))

        graph, _ = self._device.capture(work)
        return _Captured(size, graph, attention)


class _Planned:
    """A backend that has been planned: within a capture, planning would be captured too."""

    def __init__(self, attention: AttentionBackend) -> None:
        self._attention = attention

    @property
    def kv_bytes_read(self) -> int:
        return self._attention.kv_bytes_read

    def plan(self, batch: ForwardBatch) -> None:
        """It was planned before."""

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """As AttentionBackend.forward."""
        return self._attention.forward(layer, q, k, v, spec)
