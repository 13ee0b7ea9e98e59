"""The radix tree by example: the life of workers and leases."""

from __future__ import annotations

import pytest

from services.scheduler.radix_tree import RadixTree
from tests.scheduler.radix_texts import NS, hits, lease_on, run, store, toks, two_workers


@pytest.fixture
def tree() -> RadixTree:
    return two_workers()


def test_a_dropped_worker_leaves_the_others_alone(tree: RadixTree) -> None:
    on_u, on_v = run(tree, "abcdefgh", [1, 2], "u"), run(tree, "abcdefghij", [5, 6, 7], "v")
    tree.drop_worker("u")
    tree.drop_worker("u")
    tree.check()
    assert on_u.void
    assert hits(tree, "abcdefghij") == {"v": (10, 2)}
    assert tree.extend(on_u, toks("ijkl"), [3]) == [3]
    tree.forget_copy(on_u)
    tree.release(on_u)
    assert not on_v.void
    tree.drop_worker("v")
    tree.check()
    assert tree.num_nodes == 0
    assert tree.workers == ()


def test_a_worker_that_comes_back_starts_empty(tree: RadixTree) -> None:
    old = run(tree, "abcdefgh", [1, 2])
    tree.drop_worker("u")
    tree.add_worker("u")
    run(tree, "abcdefgh", [2, 1])
    tree.release(old)
    assert hits(tree, "abcdefgh") == {"u": (8, 2)}
    assert tree.evictable_pages("u") == 0
    tree.check()


def test_a_match_with_a_worker_dropped_since_raises(tree: RadixTree) -> None:
    store(tree, "abcdefgh", [1, 2])
    match = tree.match(NS, toks("abcd"))
    tree.drop_worker("u")
    with pytest.raises(KeyError):
        tree.acquire(match, "u")
    with pytest.raises(ValueError, match="already"):
        tree.add_worker("v")


def test_release_is_idempotent_and_ends_the_lease(tree: RadixTree) -> None:
    lease, other = run(tree, "abcdefgh", [1, 2]), lease_on(tree, "abcd")
    tree.release(lease)
    tree.release(lease)
    assert tree.evictable_pages("u") == 1
    with pytest.raises(ValueError, match="released"):
        tree.extend(lease, toks("ijkl"), [3])
    tree.release(other)
    assert tree.evictable_pages("u") == 2


def test_pages_must_fit_the_tokens(tree: RadixTree) -> None:
    lease = lease_on(tree, "")
    for pages in ([], [1], [1, 2, 3]):
        with pytest.raises(ValueError, match="pages for"):
            tree.extend(lease, toks("abcdef"), pages)
    with pytest.raises(ValueError, match="pages for"):
        tree.extend(lease, b"\x00\x00\x00", [1])
    assert tree.extend(lease, b"", []) == []
    tree.check()


def test_empty_namespaces_are_forgotten(tree: RadixTree) -> None:
    for number in range(20):
        tree.release(lease_on(tree, "abcd", namespace=str(number).encode()))
    store(tree, "abcd", [1], namespace=b"kept for a while")
    assert tree.clear("u") == [1]
    tree.check()
    assert tree._store.roots == {}


def test_the_ready_step_of_a_page_is_the_last_one_that_wrote_it(tree: RadixTree) -> None:
    lease = lease_on(tree, "")
    tree.extend(lease, toks("abcdef"), [1, 2], ready_step=3)
    tree.extend(lease, toks("efgh"), [2], ready_step=5)
    assert lease.node.copies["u"].ready_step == 5


def test_page_size_one_has_only_full_pages() -> None:
    tree = RadixTree(1)
    tree.add_worker("u")
    store(tree, "abcde", [1, 2, 3, 4, 5])
    store(tree, "abXY", [6, 7])
    tree.check()
    assert hits(tree, "abcdX") == {"u": (4, 4)}
    assert lease_on(tree, "abX").copy_tokens == 0


def test_a_disabled_tree_holds_nothing() -> None:
    tree = RadixTree(4, enabled=False)
    tree.add_worker("u")
    lease = lease_on(tree, "abcdefgh")
    assert tree.extend(lease, toks("abcdefghij"), [1, 2, 3]) == [1, 2, 3]
    assert (lease.num_tokens, lease.tail_page) == (0, -1)
    tree.check()
    tree.release(lease)
    assert hits(tree, "abcdefgh") == {}
    assert (tree.cached_pages("u"), tree.evictable_pages("u"), tree.num_nodes) == (0, 0, 0)
    assert tree.evict("u", 3) == []
    assert tree.clear("u") == []
    assert tree.take_freed("u") == []
    tree.drop_worker("u")
    tree.check()


def test_page_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="page_size"):
        RadixTree(0)
