"""Which decode rows of a step share pages, so that the worker reads each shared page once. Leaves reading to it.

The rows' paths through the tree meet in nodes. Those of the nodes on a path that save most are the first level; then
those that save most besides, around them or within them, up to MAX_LEVELS: (rows - 1) pages read less for each page of
a level's own, where rows that read together anyway count as one. Whoever reads one level only takes the first.

    root -- [system prompt: 10 pages] --+-- [chat A: 40 pages] -- rows 1, 2       (2 - 1) * 50 = 50
             rows 1 2 3 4 5             |                                          (3 - 1) * 30 = 60  -> two groups, and
             (5 - 1) * 10 = 40          +-- [chat B: 20 pages] -- rows 3, 4, 5     (2 - 1) * 10 = 10  -> one around them
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter

from services.scheduler.inflight import SharedGroups
from services.scheduler.node import Node
from services.scheduler.request import Request
from services.scheduler.worker import Worker
from shared import ints
from shared.nesting import levels

MIN_SHARED_PAGES = 8
"""Of a level's own. Below, reading the pages together saves less than one more pass costs."""
MAX_LEVELS = 3
"""Of groups within groups. Most trees have less; a worker may read fewer together."""
REFRESH_STEPS = 16
"""Groups found stay right while rows leave, and only miss those that came: looking at every step would not pay."""
REFRESH_STEPS_OF_GUESSES = 4
"""The same where a step brings several tokens of a request, so that rows come and go sooner."""
ROWS_PER_STEP = 4
"""Few rows are looked at sooner: it costs by the row, and of few rows one that came is a larger share."""


@dataclass(slots=True, eq=False)
class _Meeting:
    """A node where paths meet: what lies above it is shared by all `rows`."""

    pages: int
    parent: Node | None
    rows: list[Request] = field(default_factory=list)


def refresh(worker: Worker, rows: list[Request], step_id: int, patience: int = REFRESH_STEPS) -> SharedGroups:
    """The groups among the worker's decode rows, found anew where those changed and some steps have passed."""
    if worker.grouped is not rows and step_id >= worker.regroup_at:
        worker.grouped = rows
        worker.regroup_at = step_id + min(patience, len(rows) // ROWS_PER_STEP)
        worker.groups = columns(find(rows, worker.key))
    return worker.groups


def find(rows: Iterable[Request], worker: str) -> list[tuple[list[Request], int]]:
    """Groups of at least two rows with the number of full pages from position 0 that they share on `worker`.

    The outer come before the inner, which have fewer rows and more pages.
    """
    meetings = {node: place for node, place in _meetings(rows, worker).items() if len(place.rows) > 1}
    places = sorted(meetings.values(), key=attrgetter("pages"))
    number = {id(place): index for index, place in enumerate(places)}
    parents = [_number(place, meetings, number) for place in places]
    counts, pages = [len(place.rows) for place in places], [place.pages for place in places]
    found = list(levels(parents, counts, pages, _pages_spared, most=MAX_LEVELS, least_pages=MIN_SHARED_PAGES))
    taken = found[-1][0] if found else []
    return _truly_shared(place for place, flag in zip(places, taken, strict=False) if flag)


def _number(place: _Meeting, meetings: dict[Node, _Meeting], number: dict[int, int]) -> int:
    above = meetings.get(place.parent) if place.parent is not None else None
    return -1 if above is None else number[id(above)]


def _pages_spared(rows: int, spared: int, pages: int) -> int:
    return spared * pages


def columns(groups: list[tuple[list[Request], int]]) -> SharedGroups:
    return SharedGroups(
        ints.pack(request.slot for rows, _ in groups for request in rows),
        ints.pack(len(rows) for rows, _ in groups),
        ints.pack(pages for _, pages in groups),
    )


def _meetings(rows: Iterable[Request], worker: str) -> dict[Node, _Meeting]:
    meetings: dict[Node, _Meeting] = {}
    for request in rows:
        lease = request.lease
        if lease is None or lease.void:
            continue
        node, pages = lease.node, lease.num_pages
        while pages >= MIN_SHARED_PAGES and node.parent is not None:
            place = meetings.get(node)
            if place is None:
                place = meetings[node] = _Meeting(pages, node.parent)
            place.rows.append(request)
            pages -= len(node.copies[worker].pages)
            node = node.parent
    return meetings


def _truly_shared(places: Iterable[_Meeting]) -> list[tuple[list[Request], int]]:
    """Without rows that computed pages of their own before the tree got the same ones from another request.

    Nested as the places are; an outer group to which that leaves just the rows of an inner one is no more.
    """
    groups: list[tuple[list[Request], int]] = []
    innermost: dict[int, int] = {}  # by slot: which of the groups so far
    for place in places:
        heads = [request.pages[: place.pages].tobytes() for request in place.rows]
        outer = [innermost.get(request.slot, -1) for request in place.rows]
        rows, around = place.rows, outer[0]
        if heads.count(heads[0]) != len(heads) or outer.count(around) != len(outer):
            rows, around = _largest(rows, heads, outer)
        if len(rows) < 2:
            continue
        if around >= 0 and len(groups[around][0]) == len(rows):
            groups[around] = ([], 0)
        for request in rows:
            innermost[request.slot] = len(groups)
        groups.append((rows, place.pages))
    return [(rows, pages) for rows, pages in groups if rows]


def _largest(rows: list[Request], heads: list[bytes], outer: list[int]) -> tuple[list[Request], int]:
    """Most of the rows with the same pages in the same outer group, and that group."""
    alike: dict[tuple[int, bytes], list[Request]] = {}
    for request, head, around in zip(rows, heads, outer, strict=True):
        alike.setdefault((around, head), []).append(request)
    (around, _), found = max(alike.items(), key=lambda item: len(item[1]))
    return found, around
