"""Which nodes of any tree of prefixes become groups: truly shared, nested, and each saves something."""

from __future__ import annotations

import itertools
from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.groups import MAX_LEVELS, MIN_SHARED_PAGES, columns, find
from services.scheduler.lease import Lease
from services.scheduler.node import Copy, Node
from services.scheduler.request import Request
from shared import ints
from shared.nesting import antichain

WORKER = "w0/1"


@dataclass(eq=False)
class Row:
    """A decode row as far as groups look at it."""

    slot: int
    lease: Lease
    pages: array[int]


@dataclass
class Tree:
    """Nodes of so many pages each below one another, and requests that end in them."""

    root: Node = field(default_factory=lambda: Node(b"", b"", None))
    ends: dict[Node, int] = field(default_factory=dict)  # pages from position 0
    rows: list[Row] = field(default_factory=list)
    fresh: itertools.count[int] = field(default_factory=itertools.count)

    def take(self, count: int) -> array[int]:
        return array("i", itertools.islice(self.fresh, count))

    def add(self, parent: Node, pages: int) -> Node:
        node = Node(b"", b"", parent)
        node.copies[WORKER] = Copy(node, self.take(pages), 0)
        self.ends[node] = self.ends.get(parent, 0) + pages
        return node

    def path(self, node: Node) -> list[Node]:
        """From `node` up, without the root."""
        found = []
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found

    def request(self, node: Node, own_from: int | None = None) -> None:
        """One that ends in the node; from page `own_from` on it computed pages of its own."""
        shared = array("i", [page for above in reversed(self.path(node)) for page in above.copies[WORKER].pages])
        pages = shared if own_from is None else shared[:own_from] + self.take(len(shared[own_from:]))
        lease = Lease(WORKER, b"", node, cast(Any, SimpleNamespace(alive=True)), 16, pages=shared)
        self.rows.append(Row(len(self.rows), lease, pages + self.take(3)))

    def groups(self) -> list[tuple[list[Row], int]]:
        return cast(Any, find(cast("list[Request]", self.rows), WORKER))


@st.composite
def trees(draw: st.DrawFn, *, own: bool) -> Tree:
    tree = Tree()
    nodes = [tree.root]
    for _ in range(draw(st.integers(1, 12))):
        nodes.append(tree.add(draw(st.sampled_from(nodes)), draw(st.integers(1, 20))))
    for _ in range(draw(st.integers(2, 16))):
        node = draw(st.sampled_from(nodes[1:]))
        tree.request(node, draw(st.none() | st.integers(0, tree.ends[node])) if own else None)
    return tree


def spared(groups: list[tuple[list[Row], int]]) -> int:
    """Reads of pages that a worker spares by them."""
    total = 0
    for rows, pages in groups:
        start = max((count for other, count in groups if count < pages and rows[0] in other), default=0)
        total += (len(rows) - 1) * (pages - start)
    return total


@given(tree=trees(own=True))
def test_groups_are_truly_shared_and_nested(tree: Tree) -> None:
    groups = tree.groups()
    for index, (rows, pages) in enumerate(groups):
        assert len(set(map(id, rows))) == len(rows) > 1
        assert len({row.pages[:pages].tobytes() for row in rows}) == 1
        assert all(len(row.lease.pages) >= pages for row in rows)
        around = [(other, count) for other, count in groups[:index] if rows[0] in other]
        assert len(around) < MAX_LEVELS
        for other, count in around:
            assert set(map(id, rows)) < set(map(id, other))
            assert pages - count >= MIN_SHARED_PAGES
        outside = [row for other, _ in groups[:index] if rows[0] not in other for row in other]
        assert not {*map(id, rows)} & {*map(id, outside)}
        assert pages >= MIN_SHARED_PAGES


@given(tree=trees(own=True))
def test_every_group_saves_something_besides_the_others(tree: Tree) -> None:
    groups = tree.groups()
    for index in range(len(groups)):
        assert spared(groups) > spared(groups[:index] + groups[index + 1 :])


@given(tree=trees(own=False))
def test_one_level_of_them_saves_as_much_as_one_level_can(tree: Tree) -> None:
    """So that a worker which reads one level only loses nothing by the others."""

    def best(node: Node) -> int:
        below = sum(best(child) for child in tree.ends if child.parent is node)
        rows = sum(node in tree.path(row.lease.node) for row in tree.rows)
        pages = tree.ends.get(node, 0)
        return max(below, (rows - 1) * pages if pages >= MIN_SHARED_PAGES else 0)

    groups = tree.groups()
    parents = [
        max((i for i, (other, _) in enumerate(groups[:index]) if rows[0] in other), default=-1)
        for index, (rows, _) in enumerate(groups)
    ]
    saved = [(len(rows) - 1) * pages for rows, pages in groups]
    assert sum(saved[group] for group in antichain(parents, saved)) == best(tree.root)


def test_a_slot_that_changes_hands_leaves_all_its_groups() -> None:
    tree = Tree()
    system = tree.add(tree.root, 10)
    chat = tree.add(system, 10)
    for node in (chat, system, chat, chat):
        tree.request(node)
    sent = columns(cast(Any, tree.groups()))
    left = sent.without(2)
    assert [ints.unpack(column).tolist() for column in sent] == [[0, 1, 2, 3, 0, 2, 3], [4, 3], [10, 20]]
    assert [ints.unpack(column).tolist() for column in left] == [[0, 1, 3, 0, 3], [3, 2], [10, 20]]
    assert left.without(2) is left
