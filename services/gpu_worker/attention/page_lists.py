"""Page tables as the ragged lists kernels plan with: which pages, in a few numbers a row, and their ids on the host.

The ids can as well be gathered where the tables are (`flashinfer_parts.gather_pages`): then only the spans travel.

table      length    page size 4            indptr         0     2        5
7 3 . .    6                         ->     indices        7 3   1 8 2
1 8 2 .    12                               last_page_len  2     4
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int32s = NDArray[np.int32]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PageSpans:
    """A run of pages in each of n rows of a table; `page_spans` makes none without pages."""

    rows: Ints  # [n], which of the table
    starts: Ints  # [n], the run's first page in its row
    indptr: Int32s  # [n + 1]
    last_page_len: Int32s  # [n], tokens in each run's last page, 1 .. page size; 0 where it has no page

    @property
    def num_pages(self) -> int:
        return int(self.indptr[-1])

    def pages(self, tables: Int32s) -> Int32s:
        """The ids [num_pages], run after run."""
        ends = self.starts + np.diff(self.indptr)
        # Slices of rows are copied whole: several times faster than one index for each page.
        parts = [
            tables[row, start:end]
            for row, start, end in zip(self.rows.tolist(), self.starts.tolist(), ends.tolist(), strict=True)
        ]
        return np.concatenate(parts, dtype=np.int32) if parts else np.zeros(0, dtype=np.int32)


def page_spans(
    lengths: Int32s, page_size: int, width: int, skip: Int32s | None = None, rows: Int32s | Ints | None = None
) -> PageSpans:
    """Of rows of `lengths` [n] tokens all pages but the first `skip` [n] of each; `width`: pages a row's table holds.

    rows: which of the table they are, [n]; None: its first n. Raises ValueError where a row has no token left or its
    table is too short.
    """
    ends = -(-lengths.astype(np.int64) // page_size)
    starts = np.zeros_like(ends) if skip is None else skip.astype(np.int64)
    counts = ends - starts
    if len(ends) and (counts.min() < 1 or lengths.min() < 1 or ends.max() > width):
        raise ValueError("attention plan: a row has no tokens, or more than its page table holds")
    indptr = np.zeros(len(ends) + 1, dtype=np.int64)
    np.cumsum(counts, out=indptr[1:])
    return PageSpans(
        np.arange(len(ends)) if rows is None else rows.astype(np.int64),
        starts,
        indptr.astype(np.int32),
        ((lengths - 1) % page_size + 1).astype(np.int32),
    )


def keys_read(qo_lengths: Int32s, kv_lengths: Int32s, window: int) -> int:
    """Keys that rows of so many queries and keys see; `window` 0: all of them."""
    if not window:
        return int(kv_lengths.sum(dtype=np.int64))
    return int(np.minimum(kv_lengths, window + qo_lengths.astype(np.int64) - 1).sum())
