"""Eviction by example: least recently used leaves go from their ends, page by page; locked pages never."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from services.scheduler.eviction import REBUILD_AT
from services.scheduler.radix_tree import RadixTree
from tests.scheduler.radix_texts import NS, run, store, toks, two_workers


@pytest.fixture
def tree() -> RadixTree:
    return two_workers()


def use(tree: RadixTree, text: str, worker: str = "u") -> None:
    tree.release(tree.acquire(tree.match(NS, toks(text)), worker))


def cached(tree: RadixTree, text: str, worker: str = "u") -> int:
    return tree.match(NS, toks(text)).num_tokens(worker)


def test_a_long_leaf_loses_only_the_pages_at_its_end(tree: RadixTree) -> None:
    store(tree, "abcdefghijklmnop", [1, 2, 3, 4])
    assert sorted(tree.evict("u", 2)) == [3, 4]
    tree.check()
    assert cached(tree, "abcdefghijklmnop") == 8
    assert (tree.evictable_pages("u"), tree.cached_pages("u")) == (2, 2)


def test_partial_pages_go_before_the_pages_they_follow(tree: RadixTree) -> None:
    store(tree, "abcdefghij", [1, 2, 3])
    assert [tree.evict("u", 1) for _ in range(3)] == [[3], [2], [1]]
    assert tree.num_nodes == 0
    tree.check()


def test_the_least_recently_used_text_goes_first(tree: RadixTree) -> None:
    for number, text in enumerate(("aaaa", "bbbb", "cccc")):
        store(tree, text, [number])
    use(tree, "aaaa")
    assert [tree.evict("u", 1) for _ in range(3)] == [[1], [2], [0]]


def test_a_match_alone_is_no_use(tree: RadixTree) -> None:
    store(tree, "aaaa", [1])
    store(tree, "bbbb", [2])
    tree.match(NS, toks("aaaa"))
    assert tree.evict("u", 1) == [1]


def test_use_of_a_prefix_does_not_save_what_follows_it(tree: RadixTree) -> None:
    store(tree, "abcdefgh", [1, 2])
    store(tree, "xxxx", [3])
    use(tree, "abcd")
    assert [tree.evict("u", 1) for _ in range(3)] == [[2], [3], [1]]


def test_a_shared_prefix_goes_after_its_last_branch(tree: RadixTree) -> None:
    store(tree, "abcdefgh", [1, 2])
    store(tree, "abcdXXXX", [3])
    assert tree.evict("u", 1) == [2]
    assert tree.evict("u", 1) == [3]
    assert tree.evict("u", 1) == [1]
    tree.check()


def test_locked_pages_stay_whatever_is_asked_for(tree: RadixTree) -> None:
    lease = run(tree, "abcdefghij", [1, 2, 3])
    store(tree, "abcdefghXXXX", [4])
    assert tree.evictable_pages("u") == 1
    assert tree.evict("u", 100) == [4]
    assert tree.evict("u", 100) == []
    tree.check()
    assert cached(tree, "abcdefghij") == 10
    tree.release(lease)
    assert sorted(tree.evict("u", 100)) == [1, 2, 3]


def test_a_lock_on_a_prefix_leaves_the_rest_evictable(tree: RadixTree) -> None:
    store(tree, "abcdefghijkl", [1, 2, 3])
    lease = tree.acquire(tree.match(NS, toks("abcd")), "u")
    assert tree.evictable_pages("u") == 2
    assert sorted(tree.evict("u", 9)) == [2, 3]
    tree.release(lease)
    assert tree.evict("u", 9) == [1]
    tree.check()


def test_workers_evict_on_their_own(tree: RadixTree) -> None:
    store(tree, "abcdefghijkl", [1, 2, 3], "u")
    store(tree, "abcdefghijkl", [4, 5, 6], "v")
    assert tree.evict("u", 1) == [3]
    tree.check()
    assert (cached(tree, "abcdefghijkl", "u"), cached(tree, "abcdefghijkl", "v")) == (8, 12)
    assert sorted(tree.evict("u", 9)) == [1, 2]
    tree.check()
    assert cached(tree, "abcdefghijkl", "v") == 12
    assert sorted(tree.evict("v", 9)) == [4, 5, 6]
    assert tree.num_nodes == 0


def test_evicted_texts_can_come_back(tree: RadixTree) -> None:
    store(tree, "abcdefgh", [1, 2])
    tree.evict("u", 1)
    store(tree, "abcdefgh", [2])
    assert cached(tree, "abcdefgh") == 8
    assert sorted(tree.evict("u", 9)) == [1, 2]


def test_clear_takes_everything_that_is_not_locked(tree: RadixTree) -> None:
    lease = run(tree, "abcdefgh", [1, 2])
    store(tree, "abcdXXXX", [3])
    store(tree, "abcdefghij", [4])
    store(tree, "zzzz", [5], "v")
    assert sorted(tree.clear("u")) == [3, 4]
    tree.check()
    assert (cached(tree, "abcdefgh"), cached(tree, "zzzz", "v")) == (8, 4)
    tree.release(lease)
    assert sorted(tree.clear("u")) == [1, 2]
    assert tree.clear("u") == []


def test_nothing_is_evicted_where_nothing_was_asked_for(tree: RadixTree) -> None:
    store(tree, "abcd", [1])
    assert tree.evict("u", 0) == []
    assert tree.cached_pages("u") == 1
    with pytest.raises(KeyError):
        tree.evict("unknown", 1)


def test_dead_entries_do_not_pile_up_in_the_queue(tree: RadixTree) -> None:
    """Partial pages that longer ones replace leave entries behind, without any eviction."""
    pages = itertools.count()
    for number in range(1000):
        for ending in ("ef", "efg"):
            store_numbered(tree, f"{number:08d}{ending}", pages)
        assert len(tree.take_freed("u")) == 1
    queue = tree._caches["u"]._heap
    live = sum(bool(copy.pages) for _, _, copy in queue)
    assert live == 1000
    assert len(queue) - live <= live + REBUILD_AT
    tree.check()


def test_eviction_looks_at_few_leaves_of_a_large_tree(tree: RadixTree) -> None:
    pages = itertools.count()
    for number in range(2000):
        store_numbered(tree, f"{number:08d}", pages)
    queue = tree._caches["u"]._heap
    before = len(queue)
    assert len(tree.evict("u", 10)) == 10
    assert before - len(queue) <= 20


def store_numbered(tree: RadixTree, text: str, pages: Iterator[int]) -> None:
    lease = tree.acquire(tree.match(NS, toks(text)), "u")
    rest = toks(text[lease.num_tokens :])
    tree.extend(lease, rest, [next(pages) for _ in range(-(-len(rest) // 16))])
    tree.release(lease)
