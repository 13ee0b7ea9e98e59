"""Batches of nothing but decode rows, on the host: their memory is made once for each number of rows and filled anew.

A step of few rows takes about ten milliseconds and leaves nothing of Python in the caches, so that each new tensor
costs as much as a product of one layer. Leaves all other batches to `batch_builder`, and checks to `rows`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.batch_builder import shared_groups
from services.gpu_worker.rows import StepRows
from services.gpu_worker.slots import Slots
from shared.messages.step import StepCommand

Ints = NDArray[np.int64]
Ints32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Columns:
    """One batch, and its memory as arrays."""

    batch: ForwardBatch
    token_ids: Ints
    positions: Ints
    kv_lengths: Ints32
    tables: Ints32
    kv_slots: Ints
    scales: NDArray[np.float32]


class DecodeBatches:
    """A batch lasts until the next one."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        limits = slots.limits
        self._tables = torch.zeros((limits.max_slots, limits.max_pages), dtype=torch.int32)
        self._made: dict[int, _Columns] = {}

    def build(self, rows: StepRows, command: StepCommand) -> ForwardBatch:
        """As `build_batch`, for rows without prefills."""
        slots, which = self._slots, rows.slots
        count, size = len(which), slots.limits.page_size
        columns = self._made.get(count) or self._make(count)
        positions = slots.computed[which]
        pages, offsets = np.divmod(positions, size)
        width = int(pages.max()) + 1
        columns.token_ids[:] = slots.last_token[which]
        columns.positions[:] = positions
        columns.kv_lengths[:] = positions
        columns.kv_lengths[:] += 1
        columns.tables[:, :width] = slots.table[which, :width]
        columns.kv_slots[:] = slots.table[which, pages]
        columns.kv_slots[:] *= size
        columns.kv_slots[:] += offsets
        columns.scales[:] = slots.sampling.scale[which]
        if not command.group_sizes:
            return columns.batch
        return replace(columns.batch, groups=shared_groups(rows, command, slots))

    def _make(self, count: int) -> _Columns:
        ids, positions, kv_slots = torch.zeros((3, count), dtype=torch.int64)
        lengths, scales = torch.zeros(count, dtype=torch.int32), np.zeros(count, dtype=np.float32)
        batch = ForwardBatch(
            token_ids=ids,
            positions=positions,
            qo_indptr=torch.arange(count + 1, dtype=torch.int32),
            kv_lengths=lengths,
            page_tables=self._tables[:count],
            kv_slots=kv_slots,
            logit_rows=torch.arange(count),
            scales=scales,
            num_decode_rows=count,
        )
        tables = batch.page_tables
        self._made[count] = columns = _Columns(
            batch, ids.numpy(), positions.numpy(), lengths.numpy(), tables.numpy(), kv_slots.numpy(), scales
        )
        return columns
