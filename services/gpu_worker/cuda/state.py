"""What a step finds on the device: each slot's last token and page table, brought up to date by the step's changes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.batch import ForwardBatch, SharedGroup
from services.gpu_worker.slots import SlotLimits, Slots, column
from shared.messages.step import StepCommand

Ints = NDArray[np.int64]
Arrays = dict[str, NDArray]
Tensors = Mapping[str, torch.Tensor]


class DeviceState:
    """Written and read in the order of the compute stream."""

    def __init__(self, limits: SlotLimits, device: torch.device) -> None:
        self.last_token = torch.zeros(limits.max_slots, dtype=torch.int64, device=device)
        self.tables = torch.zeros((limits.max_slots, limits.max_pages), dtype=torch.int32, device=device)

    def update(self, sent: Tensors) -> None:
        """Write what `table_changes` named."""
        if len(sent["table_places"]):
            self.tables.view(-1)[sent["table_places"]] = sent["table_pages"]

    def keep(self, tokens: torch.Tensor, who: torch.Tensor) -> None:
        """Tokens int64 [n] drawn for slots `who` [n]; below 0 for who has ended, and reads none any more."""
        self.last_token[who] = tokens.clamp(min=0)

    def batch(self, host: ForwardBatch, sent: Tensors) -> ForwardBatch:
        """The batch with its tensors on the device; decode rows take the token that was sampled last.

        host: one without tables.
        """
        slots, width = sent["slots"], host.host_columns().table_width
        last = self.last_token.index_select(0, slots[: host.num_decode_rows])
        chunks = sent["chunk_tokens"]
        sizes = [len(group.rows) for group in host.groups]
        members = sent["group_rows"].split(sizes) if sizes else ()
        return ForwardBatch(
            token_ids=torch.cat([last, chunks]) if len(chunks) else last,
            positions=sent["positions"],
            qo_indptr=sent["qo_indptr"],
            kv_lengths=sent["kv_lengths"],
            page_tables=self.tables[:, :width].index_select(0, slots),
            kv_slots=sent["kv_slots"],
            logit_rows=sent["logit_rows"],
            num_decode_rows=host.num_decode_rows,
            groups=tuple(SharedGroup(r, g.num_pages) for r, g in zip(members, host.groups, strict=True)),
            host=host.host,
        )


def batch_arrays(host: ForwardBatch, slots: Ints) -> Arrays:
    """What `DeviceState.batch` needs of a batch built on the host; `slots` are those of its rows."""
    arrays = {
        "slots": slots,
        "chunk_tokens": host.token_ids[host.num_decode_rows :].numpy(),
        "positions": host.positions.numpy(),
        "qo_indptr": host.qo_indptr.numpy(),
        "kv_lengths": host.kv_lengths.numpy(),
        "kv_slots": host.kv_slots.numpy(),
        "logit_rows": host.logit_rows.numpy(),
    }
    if host.groups:
        arrays["group_rows"] = np.concatenate([group.rows.numpy() for group in host.groups])
    return arrays


def table_changes(command: StepCommand, slots: Slots) -> Arrays:
    """Flat places and new pages of the tables, once the command has been applied to the slots."""
    first = {opened.slot: 0 for opened in command.opens}
    appended, counts = np.unique(column(command.page_slots), return_counts=True)
    for slot, count in zip(appended.tolist(), counts.tolist(), strict=True):
        first.setdefault(slot, int(slots.page_counts[slot]) - count)
    who = np.array(list(first), dtype=np.int64)
    starts = np.array(list(first.values()), dtype=np.int64)
    sizes = slots.page_counts[who] - starts
    rows = np.repeat(who, sizes)
    at = np.arange(len(rows)) + np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
    return {"table_places": rows * slots.limits.max_pages + at, "table_pages": slots.table[rows, at]}
