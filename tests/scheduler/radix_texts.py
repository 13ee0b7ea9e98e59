"""What the examples of the radix tree speak of: tokens are letters, a page has four, workers are u and v."""

from __future__ import annotations

from services.scheduler.radix_tree import Lease, RadixTree
from shared.ints import pack

NS = b""


def toks(text: str) -> bytes:
    return pack(map(ord, text))


def two_workers() -> RadixTree:
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
