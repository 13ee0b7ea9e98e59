"""Which decode rows of a step share pages, so that the worker reads each shared page once. Leaves reading to it.

The rows' paths through the tree meet in nodes; a row belongs to at most one group, so of the nodes on a path the one
that saves most is taken: (rows - 1) pages read less for each page shared.

    root -- [system prompt: 10 pages] --+-- [chat A: 40 pages] -- rows 1, 2       (2 - 1) * 50 = 50
             rows 1 2 3 4 5             |                                          (3 - 1) * 30 = 60  -> two groups
             (5 - 1) * 10 = 40          +-- [chat B: 20 pages] -- rows 3, 4, 5
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.scheduler.inflight import SharedGroups
from services.scheduler.node import Node
from services.scheduler.request import Request
from services.scheduler.worker import Worker
from shared import ints

MIN_SHARED_PAGES = 8
"""Below, reading the pages together saves less than a second pass over them costs."""
REFRESH_STEPS = 16
"""Groups found stay right while rows leave, and only miss those that came: looking at every step would not pay."""


@dataclass(slots=True, eq=False)
class _Meeting:
    """A node where paths meet: what lies above it is shared by all `rows`."""

    pages: int
    parent: Node | None
    rows: list[Request] = field(default_factory=list)
    below: int = 0  # what the best groups among its children save

    @property
    def saved(self) -> int:
        return (len(self.rows) - 1) * self.pages


def refresh(worker: Worker, rows: list[Request], step_id: int) -> SharedGroups:
    """The groups among the worker's decode rows, found anew where those changed and some steps have passed."""
    if worker.grouped is not rows and step_id >= worker.regroup_at:
        worker.grouped = rows
        worker.regroup_at = step_id + REFRESH_STEPS
        worker.groups = columns(find(rows, worker.key))
    return worker.groups


def find(rows: Iterable[Request], worker: str) -> list[tuple[list[Request], int]]:
    """Groups of at least two rows with the number of full pages from position 0 that they share on `worker`."""
    meetings = {node: place for node, place in _meetings(rows, worker).items() if len(place.rows) > 1}
    deepest_first = sorted(meetings.values(), key=lambda place: -place.pages)
    for place in deepest_first:
        above = meetings.get(place.parent) if place.parent is not None else None
        if above is not None:
            above.below += max(place.saved, place.below)
    groups: list[tuple[list[Request], int]] = []
    taken: set[int] = set()
    for place in reversed(deepest_first):
        if place.saved < place.below or id(place.rows[0]) in taken:
            continue
        taken.update(map(id, place.rows))
        shared = _truly_shared(place)
        if len(shared) > 1:
            groups.append((shared, place.pages))
    return groups


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


def _truly_shared(place: _Meeting) -> list[Request]:
    """Without rows that computed pages of their own before the tree got the same ones from another request."""
    by_pages: dict[bytes, list[Request]] = {}
    for request in place.rows:
        by_pages.setdefault(request.pages[: place.pages].tobytes(), []).append(request)
    return max(by_pages.values(), key=len)
