"""ForwardBatch: one step's rows in ragged form, the whole input of a forward pass. Leaves building it to the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """Decode rows whose first `num_pages` pages are the same pages.

    A batch's groups are nested: two of them share no row, or the later one's rows are among the earlier one's, and it
    has more pages.
    """

    rows: torch.Tensor  # int32 [n], indices into the batch's rows
    num_pages: int


@dataclass(frozen=True, slots=True)
class HostColumns:
    """The batch's shape again as arrays of the host, so that planning kernels copies nothing back from a device."""

    qo_indptr: NDArray[np.int32]  # [R + 1]
    kv_lengths: NDArray[np.int32]  # [R]
    table_width: int  # P of the page tables, whose entries only the device has
    group_rows: tuple[NDArray[np.int32], ...] = ()  # as ForwardBatch.groups


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Hidden states behind the last layer that outlive the step, in `cache` [num_pages, hidden].

    computed         int64 [L - C], places among the L logits that are wanted of the step's own tokens
    recalled, pages  int64 [C], the other places, and the pages whose states they come from
    kept             int64 [K], tokens of the step whose states are kept, with `kept_pages`
    """

    cache: torch.Tensor
    computed: torch.Tensor
    recalled: torch.Tensor
    pages: torch.Tensor
    kept: torch.Tensor
    kept_pages: torch.Tensor

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """[L - C + K, hidden], computed ones and those to keep -> the states of all logits [L, hidden]."""
        own = len(self.computed)
        if len(self.kept):
            self.cache[self.kept_pages] = x[own:]
        if not len(self.recalled):
            return x[:own]
        states = x.new_empty((own + len(self.recalled), x.shape[1]))
        states[self.computed], states[self.recalled] = x[:own], self.cache[self.pages]
        return states


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """R rows with T tokens in all; the first `num_decode_rows` rows have one token each.

    tokens   [d0][d1][d2][p0 p0 p0 p0][p1 p1]      d: decode rows, p: prefill chunks
    qo_indptr 0   1   2   3            7      9
    """

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T], absolute
    qo_indptr: torch.Tensor  # int32 [R + 1]
    kv_lengths: torch.Tensor  # int32 [R], tokens in the cache once this step has written its own
    page_tables: torch.Tensor  # int32 [R, P]; entries beyond a row's pages are undefined
    kv_slots: torch.Tensor  # int64 [T], page * page_size + offset: where each token's K and V go
    logit_rows: torch.Tensor  # int64 [L], the tokens whose logits are wanted; with `hidden` [L - C]
    num_decode_rows: int
    groups: tuple[SharedGroup, ...] = field(default=())
    scales: NDArray[np.float32] | None = None  # [L], of the sums that sampling will want: as kernels.logits.Blocks
    host: HostColumns | None = None  # None: whoever needs it asks the tensors
    hidden: HiddenRows | None = None

    @property
    def num_rows(self) -> int:
        return self.qo_indptr.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    def host_columns(self) -> HostColumns:
        """`host`, or the same from the tensors, which waits for a device that is not the host."""
        if self.host is not None:
            return self.host
        return HostColumns(
            self.qo_indptr.cpu().numpy(),
            self.kv_lengths.cpu().numpy(),
            self.page_tables.shape[1],
            tuple(group.rows.cpu().numpy() for group in self.groups),
        )
