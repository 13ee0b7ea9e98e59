"""The radix tree by example: tokens are letters, a page has four, workers are u and v."""

from __future__ import annotations

import pytest

from services.scheduler.radix_tree import Lease, RadixTree
from shared.ints import pack

NS = b""


def toks(text: str) -> bytes:
    return pack(map(ord, text))


@pytest.fixture
def tree() -> RadixTree:
    tree = RadixTree(4)
    tree.add_worker("u")
    tree.add_worker("v")
    return tree


def hits(tree: RadixTree, text: str, namespace: bytes = NS) -> dict[str, tuple[int, int]]:
    found = tree.match(namespace, toks(text)).hits
    return {worker: (hit.num_tokens, hit.num_pages) for worker, hit in found.items()}


def lease_on(tree: RadixTree, text: str, worker: str = "u", namespace: bytes = NS) -> Lease:
    return tree.acquire(tree.match(namespace, toks(text)), worker)


def run(tree: RadixTree, text: str, pages: list[int], worker: str = "u", namespace: bytes = NS) -> Lease:
    """A request that computes `text` and keeps running; `pages` are those after what it shares."""
    lease = lease_on(tree, text[:-1], worker, namespace)
    assert tree.extend(lease, toks(text[lease.num_tokens :]), pages) == []
    tree.check()
    return lease


def store(tree: RadixTree, text: str, pages: list[int], worker: str = "u", namespace: bytes = NS) -> None:
    """A request that computed `text` and ended."""
    tree.release(run(tree, text, pages, worker, namespace))
    tree.check()


def held(tree: RadixTree, worker: str = "u") -> list[int]:
    return sorted(tree.pages_of(worker))


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


# -- life of workers and leases --


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
