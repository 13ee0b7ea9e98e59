"""When decode rows that share pages read them together, and how the batch is cut for it. Leaves kernels to a backend.

Two levels, merged by their log-sum-exps (Z. Ye et al., "Cascade Inference: Memory Bandwidth Efficient Shared Prefix
Batch Decoding", 2024):

    row 0   S S S S S a a          shared level: one request a group, its queries are the rows of the group
    row 1   S S S S S b            private level: a decode of every row over what is left of its table
    row 2   c c c c                in no group: the private level has all of it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.gpu_worker.attention.page_lists import PageLists, page_lists
from services.gpu_worker.batch import HostColumns, SharedGroup

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CascadeCosts:
    """What decides, in bytes of device memory traffic of one layer, so that time never needs to be known.

    A kernel more in a layer takes some 4 us to start and to end, in which a card of 3 TB/s reads 12 MB. A row of a
    group writes its partial result twice and reads it twice more than a row alone. Estimates, meant to be corrected
    by measurements.
    """

    bytes_per_key: int  # K and V of one token in one layer
    bytes_per_row: int  # the partial result of one row and its log-sum-exps
    bytes_per_launch: int = 12_000_000

    def group_gain(self, rows: int, keys: int) -> int:
        """Bytes that reading `keys` shared keys once saves, less what merging costs; launches not counted."""
        return (rows - 1) * keys * self.bytes_per_key - 4 * rows * self.bytes_per_row

    def launches(self, *, in_order: bool) -> int:
        """Kernels more: shared level and merge; where rows must be put in order, a gather before and one after."""
        return 2 if in_order else 4


@dataclass(frozen=True, slots=True)
class Cascade:
    """The two levels of a batch's decode rows."""

    order: Int32s  # [decode rows]: the grouped rows, group after group, then the others
    grouped: int  # so many of `order` are in groups
    qo_indptr: Int32s  # [g + 1], where each group begins in `order`
    shared: PageLists  # one row a group
    shared_keys: int  # of all groups
    skip: Int32s  # [decode rows], pages of each row that the shared level reads

    @property
    def in_order(self) -> bool:
        """Whether `order` is 0, 1, ... so that nothing needs to be moved."""
        return bool((self.order[:-1] < self.order[1:]).all())

    def saved_keys(self, page_size: int) -> int:
        """Keys that a layer reads less by it."""
        return int(self.skip.sum()) * page_size - self.shared_keys

    def private(self, host: HostColumns, page_size: int) -> PageLists:
        """What is left of the rows' pages, in `order`."""
        order = self.order
        return page_lists(host.page_tables[order], host.kv_lengths[order], page_size, self.skip[order])


def choose(
    host: HostColumns,
    groups: Sequence[SharedGroup],
    decode_rows: int,
    page_size: int,
    window: int,
    costs: CascadeCosts,
) -> Cascade | None:
    """The cascade that pays, or None.

    A row is in one group at most: which of nested prefixes it shares, the scheduler decides. A group that a sliding
    window does not wholly see is left out: each of its rows would see another part of the prefix.
    """
    skip = np.zeros(decode_rows, dtype=np.int32)
    taken: list[Int32s] = []
    gain = 0
    for rows, group in zip(host.group_rows, groups, strict=True):
        saved = costs.group_gain(len(rows), group.num_pages * page_size)
        if saved <= 0 or (window and host.kv_lengths[rows].max() > window):
            continue
        gain += saved
        skip[rows] = group.num_pages
        taken.append(rows)
    if gain <= costs.launches(in_order=True) * costs.bytes_per_launch:
        return None
    cascade = _cut(host, taken, skip, page_size)
    return cascade if gain > costs.launches(in_order=cascade.in_order) * costs.bytes_per_launch else None


def _cut(host: HostColumns, taken: list[Int32s], skip: Int32s, page_size: int) -> Cascade:
    first = np.array([members[0] for members in taken])
    lengths = skip[first] * page_size
    others = np.flatnonzero(skip == 0).astype(np.int32)
    return Cascade(
        order=np.concatenate([*taken, others]),
        grouped=sum(map(len, taken)),
        qo_indptr=np.cumsum([0, *map(len, taken)], dtype=np.int32),
        shared=page_lists(host.page_tables[first], lengths, page_size),
        shared_keys=int(lengths.sum()),
        skip=skip,
    )
