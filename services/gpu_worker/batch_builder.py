"""From a step's rows to the ForwardBatch on the device, vectorised over rows; leaves the checks to `rows`."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.batch import ForwardBatch, HiddenRows, HostColumns, SharedGroup
from services.gpu_worker.faults import ProtocolError
from services.gpu_worker.rows import StepRows
from services.gpu_worker.slots import Slots, column
from shared.messages.step import StepCommand

Ints = NDArray[np.int64]


def build_batch(
    rows: StepRows,
    command: StepCommand,
    slots: Slots,
    device: torch.device,
    *,
    with_tables: bool = True,
    hidden: torch.Tensor | None = None,
) -> ForwardBatch:
    """`logit_rows` are the tokens after which one is sampled, in output order, then the scored tokens span after span.

    with_tables: False leaves `page_tables` [R, 0], for who has them on its device.
    hidden: where states are kept [num_pages, hidden].
    """
    count = rows.num_computed
    owners, sizes = rows.slots[:count], rows.lengths[:count]
    starts = slots.computed[owners]
    indptr = np.zeros(count + 1, dtype=np.int64)
    np.cumsum(sizes, out=indptr[1:])
    page_size = slots.limits.page_size
    lengths = starts + sizes
    width = -(-int(lengths.max(initial=0)) // page_size)
    tables = slots.table[:, : width if with_tables else 0][owners]
    positions = starts
    if rows.num_decode != count:
        positions = np.repeat(starts - indptr[:-1], sizes) + np.arange(indptr[-1])
        owners = np.repeat(owners, sizes)
    pages = slots.table[owners, positions // page_size].astype(np.int64)
    sampling, behind = rows.sampling, rows.behind
    if rows.num_recalled:
        sampling, behind = sampling[sampling < count], behind[sampling < count]
    logit_rows = [indptr[sampling + 1] - 1 - behind]
    logit_rows += [indptr[s.row] + s.first + np.arange(len(s.targets)) for s in rows.spans]
    groups = _groups(rows, command, slots) if command.group_sizes else []
    kept = _hidden_rows(rows, slots, indptr, hidden) if hidden is not None else None
    if rows.drafts and groups:
        spread = _spread(rows, groups)
        groups = [(_pieces(spread, members), count) for members, count in groups]
        indptr, lengths, tables = (
            _cut(spread, indptr),
            _ends(spread, lengths),
            np.repeat(tables, spread, axis=0),
        )
    host = HostColumns(
        qo_indptr=indptr.astype(np.int32),
        kv_lengths=lengths.astype(np.int32),
        table_width=width,
        group_rows=tuple(members for members, _ in groups),
    )
    return ForwardBatch(
        token_ids=_on(device, np.concatenate([slots.last_token[rows.slots[: rows.num_decode]], *rows.chunks])),
        hidden=kept,
        positions=_on(device, positions),
        qo_indptr=_on(device, host.qo_indptr),
        kv_lengths=_on(device, host.kv_lengths),
        page_tables=_on(device, tables),
        kv_slots=_on(device, pages * page_size + positions % page_size),
        logit_rows=_on(device, np.concatenate(logit_rows)),
        scales=_scales(rows, slots) if device.type == "cpu" else None,
        num_decode_rows=rows.num_decode,
        groups=tuple(SharedGroup(_on(device, members), count) for members, count in groups),
        host=host,
    )


def _hidden_rows(rows: StepRows, slots: Slots, indptr: Ints, cache: torch.Tensor) -> HiddenRows | None:
    """What the step recalls of states and keeps of them."""
    if not rows.num_recalled and not rows.keeping:
        return None
    scored = sum(len(span.targets) for span in rows.spans)
    recalled = rows.sampling >= rows.num_computed
    keeping = np.array(rows.keeping, dtype=np.int64)
    columns = (
        np.flatnonzero(np.append(~recalled, np.ones(scored, dtype=np.bool_))),
        np.flatnonzero(recalled),
        _last_pages(slots, rows.slots[rows.sampling[recalled]], 0),
        indptr[keeping + 1] - 1,
        _last_pages(slots, rows.slots[keeping], rows.lengths[keeping]),
    )
    return HiddenRows(cache, *map(torch.from_numpy, columns))


def _last_pages(slots: Slots, which: Ints, added: Ints | int) -> Ints:
    """The pages of the slots' last tokens, once so many are added."""
    last = slots.computed[which] + added - 1
    return slots.table[which, last // slots.limits.page_size].astype(np.int64)


def _scales(rows: StepRows, slots: Slots) -> NDArray[np.float32]:
    scales = np.zeros(len(rows.sampling) + sum(len(span.targets) for span in rows.spans), dtype=np.float32)
    scales[: len(rows.sampling)] = slots.sampling.scale[rows.slots[rows.sampling]]
    return scales


def shared_groups(rows: StepRows, command: StepCommand, slots: Slots) -> tuple[SharedGroup, ...]:
    """The command's groups among decode rows, on the host."""
    return tuple(SharedGroup(torch.from_numpy(members), count) for members, count in _groups(rows, command, slots))


def _groups(rows: StepRows, command: StepCommand, slots: Slots) -> list[tuple[NDArray[np.int32], int]]:
    """Of each group with two rows or more: its rows and the number of pages they share. Inner after outer ones."""
    row_of = {slot: row for row, slot in enumerate(rows.slots[: rows.num_decode].tolist())}
    row_of |= {draft.slot: int(rows.sampling[draft.first]) for draft in rows.drafts}
    groups: list[tuple[NDArray[np.int32], int]] = []
    for members, start, count in _nesting(command.group_slots, command.group_sizes, command.group_pages):
        present = [row_of[slot] for slot in members if slot in row_of]
        if len(present) < 2 or count <= 0:
            continue
        _require_shared(rows.slots[present], start, count, slots)
        groups.append((np.array(present, dtype=np.int32), count))
    return groups


@lru_cache(maxsize=4)  # the same columns come step after step until a row joins, leaves or fills a page
def _nesting(
    group_slots: bytes, group_sizes: bytes, group_pages: bytes
) -> tuple[tuple[tuple[int, ...], int, int], ...]:
    """Of each group: its slots, where the pages of its own begin and where they end. Raises ProtocolError."""
    members, sizes, pages = column(group_slots), column(group_sizes), column(group_pages)
    if len(sizes) != len(pages) or sizes.sum() != len(members) or (sizes < 0).any():
        raise ProtocolError("the columns of shared groups do not fit together")
    parts = [tuple(part.tolist()) for part in np.split(members, np.cumsum(sizes)[:-1])]
    counts = pages.tolist()
    return tuple(zip(parts, _starts(parts, counts), counts, strict=True))


def _starts(groups: list[tuple[int, ...]], pages: list[int]) -> list[int]:
    """Where the pages of each group's own begin: behind those of the group around it.

    Raises ProtocolError where groups are not nested, the outer before the inner, or one has no pages of its own.
    """
    innermost: dict[int, int] = {}
    starts: list[int] = []
    for group, members in enumerate(groups):
        around = {innermost.get(slot, -1) for slot in members}
        if len(set(members)) != len(members) or len(around) > 1:
            raise ProtocolError("a slot is twice in a shared group, or in two shared groups that are not nested")
        outer = around.pop() if around else -1
        if outer >= 0 and pages[group] <= pages[outer]:
            raise ProtocolError("of two shared groups with a slot in common the inner one has no pages of its own")
        starts.append(max(pages[outer], 0) if outer >= 0 else 0)
        innermost.update(dict.fromkeys(members, group))
    return starts


def _require_shared(members: Ints, start: int, count: int, slots: Slots) -> None:
    """Of pages start .. count - 1; those before are shared by more rows than these."""
    if count > slots.limits.max_pages or (slots.computed[members] < count * slots.limits.page_size).any():
        raise ProtocolError(f"a group shares {count} pages that are not full")
    shared = slots.table[:, start:count][members]
    if (shared != shared[0]).any():
        raise ProtocolError("the pages of a shared group differ")


def _spread(rows: StepRows, groups: list[tuple[NDArray[np.int32], int]]) -> Ints:
    """Rows [R] of the batch that each row becomes. Grouped rows have one token each: one with guesses is as many rows.

    Each of its tokens sees what it would see in one row, for K and V of all are written before any is read.
    """
    spread = np.ones(rows.num_computed, dtype=np.int64)
    members = np.concatenate([members for members, _ in groups])
    spread[members] = rows.lengths[members]
    return spread


def _pieces(spread: Ints, members: NDArray[np.int32]) -> NDArray[np.int32]:
    first = np.cumsum(spread) - spread
    return np.concatenate([np.arange(first[m], first[m] + spread[m], dtype=np.int32) for m in members])


def _cut(spread: Ints, indptr: Ints) -> Ints:
    lengths = np.repeat(np.where(spread > 1, 1, np.diff(indptr)), spread)
    return np.concatenate([indptr[:1], np.cumsum(lengths)])


def _ends(spread: Ints, lengths: Ints) -> Ints:
    last = np.repeat(np.cumsum(spread), spread)  # behind the row's last piece
    return np.repeat(lengths, spread) - (last - 1 - np.arange(len(last)))


def _on(device: torch.device, values: NDArray) -> torch.Tensor:
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
