"""When decode rows that share pages read them together, and how the batch is cut for it. Leaves kernels to a backend.

Levels are merged by their log-sum-exps (Z. Ye et al., "Cascade Inference: Memory Bandwidth Efficient Shared Prefix
Batch Decoding", 2024); nested groups are levels above each other, so that each shared page is read once:

                    level 1    level 2    private
    row 0           S S S S    A A        a             a level has one request a group, whose queries are the group's
    row 1           S S S S    A A        b             rows, over the pages between those of the group around it and
    row 2           S S S S               c c           its own end; row 2 is a request without pages in level 2
    row 3           S S S S    B          d
    row 4           S S S S    B          e             private: a decode of every row over what is left of its pages
    row 5                                 f f f         in no group: comes last
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.gpu_worker.attention.nested_groups import parents
from services.gpu_worker.attention.page_lists import Int32s, PageSpans, page_spans
from services.gpu_worker.batch import HostColumns, SharedGroup
from shared.nesting import levels

MAX_LEVELS = 3
"""Shared ones. Each is a plan of its own, and the wrappers of a level take some 8 MiB of the device."""


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

    def group_gain(self, rows: int, spared: int, keys: int) -> int:
        """Bytes saved where `rows` rows read `keys` shared keys together and `spared` reads of each are spared by it.

        Less what merging costs; launches are not counted.
        """
        return spared * keys * self.bytes_per_key - 4 * rows * self.bytes_per_row

    def launches(self, number: int = 1, *, in_order: bool) -> int:
        """Kernels more with so many shared levels: each and its merge; gathers before and after to order the rows."""
        return 2 * number + (0 if in_order else 2)


@dataclass(frozen=True, slots=True)
class Level:
    """One request a group, for queries from the first of the cascade's `order` on.

    Between groups lie rows of no group of this level: requests without pages, of which merging changes nothing.
    """

    qo_indptr: Int32s  # [requests + 1]
    pages: PageSpans  # one a request

    @property
    def rows(self) -> int:
        return int(self.qo_indptr[-1])


@dataclass(frozen=True, slots=True)
class Cascade:
    """The levels of a batch's decode rows."""

    order: Int32s  # [decode rows]: so that the rows of each group lie side by side; those in no group come last
    levels: tuple[Level, ...]  # the outer first
    skip: Int32s  # [decode rows], pages of each row that shared levels read

    @property
    def in_order(self) -> bool:
        """Whether `order` is 0, 1, ... so that nothing needs to be moved."""
        return _ascends(self.order)

    def saved_keys(self, page_size: int) -> int:
        """Keys that a layer reads less by it; shared pages are full."""
        return (int(self.skip.sum()) - sum(level.pages.num_pages for level in self.levels)) * page_size

    def private(self, host: HostColumns, page_size: int) -> PageSpans:
        """What is left of the rows' pages, in `order`."""
        order = self.order
        return page_spans(host.kv_lengths[order], page_size, host.table_width, self.skip[order], order)


class Chooser:
    """For layers with one window. Groups are mostly those of the step before, and so is what was chosen then."""

    def __init__(self, page_size: int, window: int) -> None:
        self._page_size, self._window = page_size, window
        self._asked: tuple[object, ...] = ()
        self._chosen: Cascade | None = None

    def choose(
        self, host: HostColumns, groups: Sequence[SharedGroup], decode_rows: int, costs: CascadeCosts
    ) -> Cascade | None:
        """The cascade that pays most, or None: groups are chosen level by level, each must pay for itself.

        A group that the window does not wholly see is left out: its rows would see different parts of the prefix.
        """
        window, lengths = self._window, host.kv_lengths
        seen = [g for g, rows in enumerate(host.group_rows) if not window or lengths[rows].max() <= window]
        members, pages = [host.group_rows[g] for g in seen], [groups[g].num_pages for g in seen]
        asked = (decode_rows, costs, *pages, *(rows.tobytes() for rows in members))
        if asked != self._asked:
            self._asked, self._chosen = asked, _best(members, pages, decode_rows, self._page_size, costs)
        return self._chosen


def _best(
    members: Sequence[Int32s], pages: Sequence[int], decode_rows: int, page_size: int, costs: CascadeCosts
) -> Cascade | None:
    around = parents(members)

    def worth(rows: int, spared: int, count: int) -> int:
        return costs.group_gain(rows, spared, count * page_size)

    best, most = None, 0
    for taken, gain in levels(around, [len(rows) for rows in members], pages, worth, most=MAX_LEVELS):
        if gain <= most + costs.launches(in_order=True) * costs.bytes_per_launch:
            continue
        cut = _Cut([g for g, flag in enumerate(taken) if flag], members, pages, around, decode_rows)
        gain -= costs.launches(cut.depth, in_order=_ascends(cut.order)) * costs.bytes_per_launch
        if gain > most:
            best, most = cut, gain
    return None if best is None else best.cascade(page_size)


class _Cut:
    """The groups taken as levels: their depths, and rows in the order of a walk through the tree."""

    def __init__(
        self,
        taken: Sequence[int],
        members: Sequence[Int32s],
        pages: Sequence[int],
        around: Sequence[int],
        decode_rows: int,
    ) -> None:
        self._members, self._pages = members, pages
        self._inner: dict[int, list[int]] = {-1: []}  # groups right within each; -1: within none
        self._outer: dict[int, int] = {}
        self._innermost = np.full(decode_rows, -1, dtype=np.int32)
        for group in taken:
            outer = around[group]
            while outer >= 0 and outer not in self._outer:
                outer = around[outer]
            self._outer[group] = outer
            self._inner[outer].append(group)
            self._inner[group] = []
            self._innermost[members[group]] = group
        self._heights = dict.fromkeys(self._inner, 0)
        firsts = np.full(len(pages) + 1, decode_rows, dtype=np.int32)
        firsts[self._innermost[::-1] + 1] = np.arange(decode_rows - 1, -1, -1)  # of equal places the last one counts
        self._firsts = firsts[1:].tolist()
        for group in reversed(taken):
            outer = self._outer[group]
            self._heights[outer] = max(self._heights[outer], self._heights[group] + 1)
            if outer >= 0:
                self._firsts[outer] = min(self._firsts[outer], self._firsts[group])
        self.depth = self._heights[-1]
        self._walked: list[int] = []  # groups, each after those within it
        self._levels: list[list[tuple[int, int, int]]] = [[] for _ in range(self.depth)]  # groups, their part of it
        self._walk(-1, 0)
        places = np.zeros(len(pages) + 1, dtype=np.int32)  # in the walk, of the rows right within each group
        places[np.array(self._walked) + 1] = np.arange(len(self._walked))
        placed = places[self._innermost + 1]
        self.order = np.argsort(placed, kind="stable").astype(np.int32)
        self._ends = [0, *np.cumsum(np.bincount(placed, minlength=len(self._walked))).tolist()]

    def _walk(self, group: int, depth: int) -> None:
        """Those with the most levels first, so that every level begins at the first row."""
        first = len(self._walked)
        for part in sorted(self._inner[group], key=lambda part: (-self._heights[part], self._firsts[part])):
            self._walk(part, depth + 1)
        self._walked.append(group)
        if depth:
            self._levels[depth - 1].append((group, first, len(self._walked)))

    def cascade(self, page_size: int) -> Cascade:
        skips = np.array([0, *self._pages], dtype=np.int32)
        found = tuple(self._level(groups, page_size) for groups in self._levels)
        return Cascade(self.order, found, skips[self._innermost + 1])

    def _level(self, groups: Sequence[tuple[int, int, int]], page_size: int) -> Level:
        queries, pages, rows, starts, last = [0], [0], [], [], []
        for group, first, until in groups:
            begin, end = self._ends[first], self._ends[until]
            if begin > queries[-1]:  # rows between groups: a request without pages
                queries.append(begin)
                pages.append(pages[-1])
                rows.append(0)
                starts.append(0)
                last.append(0)
            outer = self._outer[group]
            queries.append(end)
            rows.append(int(self._members[group][0]))
            starts.append(self._pages[outer] if outer >= 0 else 0)
            pages.append(pages[-1] + self._pages[group] - starts[-1])
            last.append(page_size)
        indptr, qo_indptr, last_page_len = (np.array(values, dtype=np.int32) for values in (pages, queries, last))
        return Level(qo_indptr, PageSpans(np.array(rows), np.array(starts), indptr, last_page_len))


def _ascends(order: Int32s) -> bool:
    return bool((order[:-1] < order[1:]).all())
