"""Which of nested groups of rows are worth reading together. Leaves what a reading costs to the caller.

Groups form a forest: a row of a group is in all groups around it, which share fewer pages. They are numbered so that
the outer comes before the inner; `parents` names the one around each, or -1.

    0: 5 rows, 10 pages --+-- 1: 2 rows, 50 pages        parents -1 0 0
                          +-- 2: 3 rows, 30 pages
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

Worth = Callable[[int, int, int], int]
"""(rows, reads spared of each page, pages) -> what reading the pages once is worth; nothing is gained below 1."""


def antichain(parents: Sequence[int], saved: Sequence[int]) -> list[int]:
    """Of all sets of groups none of which lies within another the one that saves most, in ascending order."""
    below = [0] * len(saved)  # what the best groups within each save
    for group in range(len(saved) - 1, -1, -1):
        if parents[group] >= 0:
            below[parents[group]] += max(saved[group], below[group])
    chosen: list[int] = []
    covered = [False] * len(saved)
    for group, around in enumerate(parents):
        if around >= 0 and covered[around]:
            covered[group] = True
        elif saved[group] > 0 and saved[group] >= below[group]:
            covered[group] = True
            chosen.append(group)
    return chosen


def levels(
    parents: Sequence[int],
    rows: Sequence[int],
    pages: Sequence[int],
    worth: Worth,
    *,
    most: int,
    least_pages: int = 1,
) -> Iterator[tuple[list[bool], int]]:
    """Which groups are taken, and what that is worth, for one level, for two, ... up to `most`.

    The first level is the best antichain. Each one more is the best antichain among the others, and a group in it is
    worth what it adds: its pages count from where those of the group around it end, and of its rows those within it
    that read together anyway count as one. Every group taken has `least_pages` of its own. Ends where nothing is
    added.
    """
    taken, total = [False] * len(parents), 0
    for _ in range(most):
        saved = _added(parents, rows, pages, worth, taken, least_pages)
        chosen = antichain(parents, saved)
        if not chosen:
            return
        for group in chosen:
            taken[group] = True
            total += saved[group]
        yield taken.copy(), total
        if all(taken):
            return


def _added(
    parents: Sequence[int],
    rows: Sequence[int],
    pages: Sequence[int],
    worth: Worth,
    taken: Sequence[bool],
    least_pages: int,
) -> list[int]:
    """What each group that is not taken is worth besides those that are."""
    count = len(parents)
    starts = [0] * count  # pages of the nearest group around that is taken
    for group, around in enumerate(parents):
        if around >= 0:
            starts[group] = pages[around] if taken[around] else starts[around]
    spared = [0] * count  # reads of each page that the nearest groups within spare already
    ends = [max(pages, default=0) + least_pages] * count  # the first page that one of these reads to
    saved = [0] * count
    for group in range(count - 1, -1, -1):
        around, own = parents[group], pages[group] - starts[group]
        if not taken[group] and min(own, ends[group] - pages[group]) >= least_pages:
            saved[group] = worth(rows[group], rows[group] - 1 - spared[group], own)
        if around >= 0:
            spared[around] += rows[group] - 1 if taken[group] else spared[group]
            ends[around] = min(ends[around], pages[group] if taken[group] else ends[group])
    return saved
