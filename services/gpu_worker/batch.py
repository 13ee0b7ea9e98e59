"""ForwardBatch: one step's rows in ragged form, the whole input of a forward pass. Leaves building it to the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """Decode rows whose first `num_pages` pages are the same pages."""

    rows: torch.Tensor  # int32 [n], indices into the batch's rows
    num_pages: int


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
    logit_rows: torch.Tensor  # int64 [L], the tokens whose logits are wanted
    num_decode_rows: int
    groups: tuple[SharedGroup, ...] = field(default=())

    @property
    def num_rows(self) -> int:
        return self.qo_indptr.shape[0] - 1

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]
