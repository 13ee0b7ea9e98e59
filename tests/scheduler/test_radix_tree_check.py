"""The tree's own check: it finds every kind of damage, names it, and can be done in pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.scheduler.node import Copy, Node
from services.scheduler.radix_tree import RadixTree
from tests.scheduler.radix_texts import NS, run, store, toks, two_workers


class Damaged:
    """A small tree with a shared prefix, two branches, a running request with a tail, and one about to copy."""

    def __init__(self) -> None:
        self.tree = two_workers()
        self.running = run(self.tree, "abcdefghij", [1, 2, 3])
        store(self.tree, "abcdXXXX", [4])
        store(self.tree, "abcdefgh", [1, 2], "v")
        self.reader = self.tree.acquire(self.tree.match(NS, toks("abcdXXY")), "u")
        self.cache = self.tree._caches["u"]

    def node(self, text: str) -> Node:
        node = self.tree._store.roots[NS]
        for start in range(0, len(text), 4):
            node = node.children[toks(text[start : start + 4])]
        return node

    def copy(self, text: str) -> Copy:
        return self.node(text).copies["u"]


def lock_too_much(damaged: Damaged) -> None:
    damaged.copy("abcdXXXX").lock_ref += 1


def pin_too_much(damaged: Damaged) -> None:
    damaged.copy("abcdefgh").pins += 1


def page_twice(damaged: Damaged) -> None:
    damaged.copy("abcdXXXX").pages[0] = 1


def page_too_many(damaged: Damaged) -> None:
    damaged.copy("abcdXXXX").pages.append(9)


def miscount(damaged: Damaged) -> None:
    damaged.cache.cached += 1


def miscount_evictable(damaged: Damaged) -> None:
    damaged.cache.evictable += 1


def miscount_nodes(damaged: Damaged) -> None:
    damaged.tree._store.num_nodes += 1


def lose_key(damaged: Damaged) -> None:
    damaged.copy("abcd").keys.pop()


def lose_parent(damaged: Damaged) -> None:
    for text in ("", "abcd"):
        del damaged.node(text).copies["v"]


def lose_node(damaged: Damaged) -> None:
    damaged.node("abcd").children.clear()


def wrong_parent(damaged: Damaged) -> None:
    damaged.node("abcdefgh").parent = damaged.node("abcdXXXX")


def wrong_tokens(damaged: Damaged) -> None:
    damaged.node("abcdXXXX").tokens = toks("YYYY")


def partial_inside(damaged: Damaged) -> None:
    damaged.node("abcd").tokens = toks("abc")


def forget_in_queue(damaged: Damaged) -> None:
    damaged.tree._caches["v"]._heap.clear()


def not_queued(damaged: Damaged) -> None:
    damaged.node("abcdefgh").copies["v"].queued = False


def held_and_freed(damaged: Damaged) -> None:
    damaged.cache.freed.append(4)


def freed_twice(damaged: Damaged) -> None:
    damaged.cache.freed += [8, 8]


def older_parent(damaged: Damaged) -> None:
    damaged.node("abcd").copies["v"].last_used = 0


def wrong_lease_pages(damaged: Damaged) -> None:
    damaged.running.pages[0] = 9


def wrong_tail(damaged: Damaged) -> None:
    damaged.running.tail_page = 9


def released_lease(damaged: Damaged) -> None:
    damaged.running.released = True


def empty_root(damaged: Damaged) -> None:
    damaged.tree._store.roots[b"x"] = Node(b"", b"x", None)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lock_too_much, "lock_ref 1 is not what the leases hold"),
        (pin_too_much, "1 pins are not what the leases hold"),
        (page_twice, "a page is in the tree twice"),
        (page_too_many, "has 2 pages"),
        (miscount, "5 counted"),
        (miscount_evictable, "1 counted"),
        (miscount_nodes, "are reachable"),
        (lose_key, "the keys are not those of the children"),
        (lose_parent, "the parent has no copy"),
        (lose_node, "the keys are not those of the children"),
        (wrong_parent, "has another parent"),
        (wrong_tokens, "has the key of other tokens"),
        (partial_inside, "has the key of other tokens"),
        (forget_in_queue, "1 copies say they are queued, 0 are"),
        (not_queued, "can be evicted but is not queued"),
        (held_and_freed, "a page is held and freed"),
        (freed_twice, "a page was freed twice"),
        (older_parent, "parent is older"),
        (wrong_lease_pages, "a lease's pages are not those of its path"),
        (wrong_tail, "a lease's tail is another page"),
        (released_lease, "a released lease counts as live"),
        (empty_root, "has a root that nobody holds"),
    ],
)
def test_damage_is_found_and_named(damage: Callable[[Damaged], None], message: str) -> None:
    damaged = Damaged()
    damaged.tree.check()
    damage(damaged)
    with pytest.raises(AssertionError, match=message):
        damaged.tree.check()


def wide_tree() -> RadixTree:
    tree = two_workers()
    for number in range(500):
        lease = tree.acquire(tree.match(NS, b""), "u")
        tree.extend(lease, toks(f"{number:04d}"), [number])
        tree.release(lease)
    return tree


def test_the_audit_of_a_large_tree_comes_in_pieces() -> None:
    tree = wide_tree()
    assert sum(1 for _ in tree.audit()) >= 5
    tree._caches["u"].cached += 1
    with pytest.raises(AssertionError, match="500 pages cached, 501 counted"):
        list(tree.audit())


def test_the_audit_gives_up_when_the_tree_changes_meanwhile() -> None:
    tree = wide_tree()
    audit = tree.audit()
    next(audit)
    tree.evict("u", 100)
    assert list(audit) == []
    tree.check()
