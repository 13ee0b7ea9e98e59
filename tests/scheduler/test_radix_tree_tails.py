"""The radix tree by example: partly filled pages, and pages that are about to be copied."""

from __future__ import annotations

import pytest

from services.scheduler.radix_tree import RadixTree
from tests.scheduler.radix_texts import held, hits, lease_on, run, store, toks, two_workers


@pytest.fixture
def tree() -> RadixTree:
    return two_workers()


# -- tails --


def test_an_open_tail_grows_into_a_full_page(tree: RadixTree) -> None:
    lease = run(tree, "abcdef", [1, 2])
    assert (lease.num_tokens, lease.tail_page, lease.tail_tokens) == (4, 2, 2)
    assert tree.extend(lease, toks("efg"), [2]) == []
    assert (lease.num_tokens, lease.tail_page, lease.tail_tokens) == (4, 2, 3)
    assert tree.extend(lease, toks("efghi"), [2, 3]) == []
    assert (lease.num_tokens, lease.tail_page, lease.tail_tokens) == (8, 3, 1)
    tree.check()
    assert tree.num_nodes == 2
    assert hits(tree, "abcdefghij") == {"u": (9, 2)}


def test_an_open_tail_is_copied_up_to_the_tokens_the_tree_knows(tree: RadixTree) -> None:
    writer = run(tree, "abcdef", [1, 2])
    reader = lease_on(tree, "abcdefgh")
    assert (reader.copy_source, reader.copy_tokens) == (2, 2)
    assert tree.extend(writer, toks("efghij"), [2, 3]) == []
    tree.check()
    assert tree.extend(reader, toks("efgX"), [9]) == []
    tree.check()
    assert hits(tree, "abcdefghij") == {"u": (10, 2)}
    assert hits(tree, "abcdefgX") == {"u": (8, 2)}


def test_a_tail_that_brings_nothing_new_stays_as_it_is(tree: RadixTree) -> None:
    lease = run(tree, "abcdef", [1, 2])
    assert tree.extend(lease, toks("ef"), [2]) == []
    assert tree.extend(lease, toks("e"), [2]) == []
    assert (lease.tail_page, lease.tail_tokens) == (2, 2)
    with pytest.raises(ValueError, match="tail"):
        tree.extend(lease, toks("eX"), [2])
    with pytest.raises(ValueError, match="tail"):
        tree.extend(lease, toks("eXg"), [2])
    with pytest.raises(ValueError, match="tail"):
        tree.extend(lease, toks("efg"), [3])
    tree.check()


def test_a_tail_grown_to_a_page_that_a_sibling_has_goes_back_to_its_request(tree: RadixTree) -> None:
    first = run(tree, "abcdef", [1, 2])
    second = lease_on(tree, "abcd")
    assert tree.extend(second, toks("efgh"), [7]) == []
    assert tree.extend(first, toks("efghi"), [2, 3]) == [2]
    assert list(first.pages) == [1, 7]
    assert (first.tail_page, first.tail_tokens) == (3, 1)
    tree.check()
    assert held(tree) == [1, 3, 7]


def test_a_tail_stays_when_another_page_holds_its_tokens(tree: RadixTree) -> None:
    first, second = run(tree, "abcdef", [1, 2]), lease_on(tree, "abcd")
    assert tree.extend(second, toks("efg"), [7]) == []
    assert tree.extend(first, toks("efg"), [2]) == []
    assert (first.tail_page, first.tail_tokens) == (2, 2)
    assert tree.extend(first, toks("efgX"), [2]) == []
    assert list(first.pages) == [1, 2]
    tree.check()


def test_a_partial_leaf_is_replaced_by_a_longer_page(tree: RadixTree) -> None:
    store(tree, "abcdef", [1, 2])
    store(tree, "abcdefg", [3])
    assert tree.take_freed("u") == [2]
    assert tree.take_freed("u") == []
    store(tree, "abcdefgh", [4])
    assert tree.take_freed("u") == [3]
    assert held(tree) == [1, 4]


def test_a_partial_leaf_is_replaced_by_a_page_that_another_worker_has(tree: RadixTree) -> None:
    store(tree, "abcdefgh", [5, 6], "v")
    store(tree, "abcdef", [1, 2], "u")
    store(tree, "abcdefgh", [3], "u")
    assert (tree.take_freed("u"), tree.take_freed("v")) == ([2], [])
    assert tree.num_nodes == 2
    assert (held(tree, "u"), held(tree, "v")) == ([1, 3], [5, 6])


def test_a_partial_leaf_of_another_text_stays(tree: RadixTree) -> None:
    store(tree, "abcdef", [1, 2])
    store(tree, "abcdeXgh", [3])
    assert tree.take_freed("u") == []
    assert held(tree) == [1, 2, 3]


def test_a_shorter_partial_page_is_refused(tree: RadixTree) -> None:
    store(tree, "abcdefg", [1, 2])
    lease = lease_on(tree, "abcd")
    assert tree.extend(lease, toks("ef"), [3]) == [3]
    assert lease.tail_page == -1
    tree.check()


def test_a_tail_made_redundant_while_open_is_freed_at_release(tree: RadixTree) -> None:
    first, second = run(tree, "abcdef", [1, 2]), lease_on(tree, "abcd")
    tree.extend(second, toks("efgh"), [7])
    assert tree.take_freed("u") == []
    tree.release(first)
    assert tree.take_freed("u") == [2]
    tree.check()


def test_equal_tails_on_two_workers_part_when_one_grows(tree: RadixTree) -> None:
    on_u, on_v = run(tree, "abcdef", [1, 2], "u"), run(tree, "abcdef", [5, 6], "v")
    assert tree.num_nodes == 2
    tree.extend(on_u, toks("efg"), [2])
    tree.check()
    assert hits(tree, "abcdefgh") == {"u": (7, 1), "v": (6, 1)}
    tree.extend(on_v, toks("efgh"), [6])
    tree.check()
    assert hits(tree, "abcdefgh") == {"u": (7, 1), "v": (8, 2)}


# -- pages to be copied --


def test_a_page_to_be_copied_is_not_evicted(tree: RadixTree) -> None:
    store(tree, "abcdefghijkl", [1, 2, 3])
    lease = lease_on(tree, "abcdeX")
    assert lease.copy_source == 2
    assert tree.evictable_pages("u") == 1
    assert tree.evict("u", 9) == [3]
    tree.check()
    tree.extend(lease, toks("eX"), [7])
    assert tree.evictable_pages("u") == 1
    assert tree.evict("u", 9) == [2]
    tree.check()


def test_a_partial_page_to_be_copied_is_not_freed_as_redundant(tree: RadixTree) -> None:
    store(tree, "abcdef", [1, 2])
    reader = lease_on(tree, "abcdeX")
    writer = lease_on(tree, "abcd")
    tree.extend(writer, toks("efgh"), [3])
    assert tree.take_freed("u") == []
    tree.release(reader)
    assert sorted(tree.evict("u", 9)) == [2]
    tree.check()


def test_a_page_that_goes_back_to_its_request_takes_no_other_pages_place(tree: RadixTree) -> None:
    """The page to be copied leaves the tree; the pages that follow it there must not be kept in its stead."""
    writer = run(tree, "abcdef", [1, 2])
    reader = lease_on(tree, "abcdeX")
    assert reader.copy_source == 2
    other = run(tree, "abcdefgh", [7])
    assert tree.extend(writer, toks("efghijkl"), [2, 3]) == [2]
    tree.check()
    tree.release(writer)
    assert tree.evictable_pages("u") == 1
    assert tree.evict("u", 9) == [3]
    tree.release(reader)
    tree.release(other)
    assert sorted(tree.evict("u", 9)) == [1, 7]
    tree.check()


def test_a_page_to_be_copied_can_be_forgotten(tree: RadixTree) -> None:
    store(tree, "abcdefgh", [1, 2])
    lease = lease_on(tree, "abcdef")
    assert tree.evictable_pages("u") == 0
    tree.forget_copy(lease)
    assert (lease.copy_source, lease.copy_tokens) == (-1, 0)
    assert tree.evict("u", 1) == [2]
    tree.check()


def test_a_page_to_be_copied_survives_the_split_of_its_node(tree: RadixTree) -> None:
    store(tree, "abcdefghijklmnop", [1, 2, 3, 4])
    reader = lease_on(tree, "abcdeX")
    tree.release(lease_on(tree, "abcdefghijkl"))
    tree.check()
    assert sorted(tree.evict("u", 9)) == [3, 4]
    assert reader.copy_source == 2
    tree.check()
