"""The radix tree by example: matching and sharing."""

from __future__ import annotations

import pytest

from services.scheduler.radix_tree import RadixTree
from shared.ints import pack
from tests.scheduler.radix_texts import NS, held, hits, lease_on, run, store, toks, two_workers


@pytest.fixture
def tree() -> RadixTree:
    return two_workers()


# -- matching --


def test_nothing_matches_in_an_empty_tree(tree: RadixTree) -> None:
    assert hits(tree, "abcdefgh") == {}
    assert hits(tree, "") == {}
    lease = lease_on(tree, "abcdefgh")
    assert (lease.num_pages, lease.num_tokens, lease.copy_tokens) == (0, 0, 0)
    tree.check()


def test_a_repeated_prompt_hits_all_but_its_last_token(tree: RadixTree) -> None:
    store(tree, "abcdefghij", [1, 2, 3])
    lease = lease_on(tree, "abcdefghi")
    assert list(lease.pages) == [1, 2]
    assert (lease.copy_source, lease.copy_tokens) == (3, 1)


def test_a_repeated_prompt_of_full_pages_copies_its_last_page(tree: RadixTree) -> None:
    store(tree, "abcdefgh", [1, 2])
    lease = lease_on(tree, "abcdefg")
    assert list(lease.pages) == [1]
    assert (lease.copy_source, lease.copy_tokens) == (2, 3)
    tree.check()


def test_each_worker_has_its_own_hit(tree: RadixTree) -> None:
    store(tree, "abcdefghijkl", [1, 2, 3], "u")
    store(tree, "abcdefgx", [7, 8], "v")
    assert hits(tree, "abcdefghijkl") == {"u": (12, 3), "v": (7, 1)}
    assert hits(tree, "abcdefgxy") == {"u": (7, 1), "v": (8, 2)}
    assert hits(tree, "abX") == {"u": (2, 0), "v": (2, 0)}
    assert hits(tree, "X") == {}


def test_a_match_ends_inside_a_page_in_the_middle_of_a_node(tree: RadixTree) -> None:
    store(tree, "abcdefghijkl", [1, 2, 3])
    assert tree.num_nodes == 1
    assert hits(tree, "abcdefXX") == {"u": (6, 1)}
    lease = lease_on(tree, "abcdefXX")
    assert list(lease.pages) == [1]
    assert (lease.copy_source, lease.copy_tokens) == (2, 2)
    assert tree.num_nodes == 2
    tree.check()


def test_the_best_of_many_children_is_found_inside_their_first_pages(tree: RadixTree) -> None:
    for number, text in enumerate(("aaaa", "abaa", "abba", "abbb", "abbz", "acaa", "b")):
        store(tree, text, [number])
    match = tree.match(NS, toks("abbcdefg"))
    lease = tree.acquire(match, "u")
    assert lease.copy_tokens == 3
    assert lease.copy_source in (3, 4)
    assert hits(tree, "abaz") == {"u": (3, 0)}
    assert hits(tree, "aczz") == {"u": (2, 0)}


def test_tokens_that_share_bytes_are_different_tokens(tree: RadixTree) -> None:
    """0x0101 and 0x0201 begin with the same byte in memory."""
    lease = tree.acquire(tree.match(NS, b""), "u")
    tree.extend(lease, pack([7, 0x0101, 7, 7]), [1])
    assert tree.match(NS, pack([7, 0x0201, 7, 7])).num_tokens("u") == 1
    assert tree.match(NS, pack([0x0107])).num_tokens("u") == 0


def test_namespaces_share_nothing(tree: RadixTree) -> None:
    store(tree, "abcdefgh", [1, 2], namespace=b"one")
    store(tree, "abcdefgh", [3, 4], namespace=b"two")
    assert hits(tree, "abcdefgh") == {}
    assert list(lease_on(tree, "abcdefgh", namespace=b"one").pages) == [1, 2]
    assert list(lease_on(tree, "abcdefgh", namespace=b"two").pages) == [3, 4]
    tree.check()


def test_matching_changes_nothing(tree: RadixTree) -> None:
    store(tree, "abcdefgh", [1, 2])
    before = tree.num_nodes, tree.evictable_pages("u")
    tree.match(NS, toks("abcdXX"))
    assert (tree.num_nodes, tree.evictable_pages("u")) == before


def test_an_outdated_match_is_made_again(tree: RadixTree) -> None:
    store(tree, "abcdefgh", [1, 2])
    match = tree.match(NS, toks("abcdefgh"))
    assert tree.evict("u", 1) == [2]
    store(tree, "abcdXYZW", [5])
    assert list(tree.acquire(match, "u").pages) == [1]
    tree.check()


# -- sharing and splitting --


def test_texts_that_part_inside_a_page_share_the_pages_before(tree: RadixTree) -> None:
    store(tree, "abcdefghijkl", [1, 2, 3])
    store(tree, "abcdefXhijkl", [4, 5])
    assert held(tree) == [1, 2, 3, 4, 5]
    assert hits(tree, "abcdefghijkl") == {"u": (12, 3)}
    assert hits(tree, "abcdefXhijkl") == {"u": (12, 3)}


def test_splits_keep_every_workers_pages_and_locks(tree: RadixTree) -> None:
    running = run(tree, "abcdefghijkl", [1, 2, 3], "u")
    store(tree, "abcdefghijkl", [4, 5, 6], "v")
    assert tree.num_nodes == 1
    other = lease_on(tree, "abcdefgh", "v")
    assert tree.num_nodes == 2
    tree.check()
    assert (tree.evictable_pages("u"), tree.evictable_pages("v")) == (0, 1)
    assert tree.evict("v", 9) == [6]
    assert hits(tree, "abcdefghijkl") == {"u": (12, 3), "v": (8, 2)}
    tree.release(running)
    tree.release(other)
    assert (tree.evictable_pages("u"), tree.evictable_pages("v")) == (3, 2)
    tree.check()


def test_a_lease_stays_right_when_its_node_is_split(tree: RadixTree) -> None:
    running = run(tree, "abcdefghijkl", [1, 2, 3])
    lease_on(tree, "abcd")
    tree.check()
    assert list(running.pages) == [1, 2, 3]
    assert tree.extend(running, toks("mnop"), [4]) == []
    assert hits(tree, "abcdefghijklmnop") == {"u": (16, 4)}
    tree.check()


def test_a_conversation_on_one_worker_stays_one_node(tree: RadixTree) -> None:
    text, page = "", 0
    for turn in range(10):
        text += chr(97 + turn) * 7
        lease = lease_on(tree, text[:-1])
        needed = -(-len(text) // 4) - lease.num_pages
        tree.extend(lease, toks(text[lease.num_tokens :]), list(range(page, page + needed)))
        tree.release(lease)
        page += needed
    tree.check()
    assert tree.num_nodes == 2  # the full pages and the last partial one
    assert hits(tree, text) == {"u": (70, 17)}


def test_a_long_text_is_a_chain_of_bounded_nodes(tree: RadixTree) -> None:
    text = "".join(chr(1000 + index) for index in range(10_000))
    lease = lease_on(tree, text)
    tree.extend(lease, toks(text), list(range(2500)))
    tree.check()
    assert tree.num_nodes == 3
    assert list(lease.pages) == list(range(2500))
    assert hits(tree, text) == {"u": (10_000, 2500)}


def test_two_requests_that_compute_the_same_keep_their_duplicates(tree: RadixTree) -> None:
    first, second = lease_on(tree, "abcdefgh"), lease_on(tree, "abcdefgh")
    assert tree.extend(first, toks("abcdefghij"), [1, 2, 3]) == []
    assert tree.extend(second, toks("abcdefghij"), [4, 5, 6]) == [4, 5, 6]
    assert list(second.pages) == [1, 2]
    assert (second.tail_page, first.tail_page) == (-1, 3)
    assert tree.extend(second, toks("ijkl"), [6]) == []
    assert list(second.pages) == [1, 2, 6]
    tree.check()
    assert held(tree) == [1, 2, 3, 6]


def test_pages_of_another_worker_are_joined_by_own_ones(tree: RadixTree) -> None:
    store(tree, "abcdefghijkl", [1, 2, 3], "u")
    lease = lease_on(tree, "abcdefghijkl", "v")
    assert lease.num_pages == 0
    assert tree.extend(lease, toks("abcdefghXXXX"), [7, 8, 9]) == []
    tree.check()
    assert hits(tree, "abcdefghijkl") == {"u": (12, 3), "v": (8, 2)}
    assert held(tree, "v") == [7, 8, 9]


def test_pages_are_refused_one_by_one(tree: RadixTree) -> None:
    store(tree, "abcdefgh", [1, 2])
    lease = lease_on(tree, "")
    assert tree.extend(lease, toks("abcdefghijklmn"), [4, 5, 6, 7]) == [4, 5]
    assert list(lease.pages) == [1, 2, 6]
    assert lease.tail_page == 7
    tree.check()
