"""Page tables as the ragged lists kernels plan with, computed on the host. Leaves devices to the caller.

table      length    page size 4            indptr         0     2        5
7 3 . .    6                         ->     indices        7 3   1 8 2
1 8 2 .    12                               last_page_len  2     4
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PageLists:
    """The pages of n rows one after the other; a row has at least one page."""

    indptr: Int32s  # [n + 1]
    indices: Int32s  # [indptr[-1]]
    last_page_len: Int32s  # [n], tokens in each row's last page, 1 .. page size


def page_lists(tables: Int32s, lengths: Int32s, page_size: int, skip: Int32s | None = None) -> PageLists:
    """The pages of rows with tables [n, P] and `lengths` [n] tokens, without the first `skip` [n] pages of each.

    Raises ValueError where a row has no token left or its table is too short.
    """
    ends = -(-lengths.astype(np.int64) // page_size)
    starts = np.zeros_like(ends) if skip is None else skip.astype(np.int64)
    counts = ends - starts
    if len(ends) and (counts.min() < 1 or lengths.min() < 1 or ends.max() > tables.shape[1]):
        raise ValueError("attention plan: a row has no tokens, or more than its page table holds")
    indptr = np.zeros(len(ends) + 1, dtype=np.int64)
    np.cumsum(counts, out=indptr[1:])
    # Slices of rows are copied whole: several times faster than one index for each page.
    parts = [table[start:end] for table, start, end in zip(tables, starts.tolist(), ends.tolist(), strict=True)]
    return PageLists(
        indptr.astype(np.int32),
        np.concatenate(parts, dtype=np.int32) if parts else np.zeros(0, dtype=np.int32),
        ((lengths - 1) % page_size + 1).astype(np.int32),
    )


def keys_read(qo_lengths: Int32s, kv_lengths: Int32s, window: int) -> int:
    """Keys that rows of so many queries and keys see; `window` 0: all of them."""
    if not window:
        return int(kv_lengths.sum(dtype=np.int64))
    return int(np.minimum(kv_lengths, window + qo_lengths.astype(np.int64) - 1).sum())
