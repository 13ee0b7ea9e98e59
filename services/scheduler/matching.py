"""Walks of the tree: every worker's longest prefix, and what followed it. Leaves locks to the tree; changes nothing."""

from __future__ import annotations

from bisect import bisect_left

from services.scheduler.lease import Hit
from services.scheduler.node import TOKEN_BYTES, Node, Probe, common_tokens

MAX_COMPARED = 8
"""Children that go on alike and are compared by their last use."""


def find_hits(root: Node, tokens: bytes, page_bytes: int) -> dict[str, Hit]:
    """Hits by worker; those that hold nothing are absent.

    Down over the deepest path, whoever holds it; then up again, where each worker's hit is settled at the deepest
    node it has a copy of. Those of a node hold its parent too, so a longer dict of copies means new workers.
    """
    hits: dict[str, Hit] = {}
    node, position = root, 0
    last_page = len(tokens) - page_bytes
    while position <= last_page:
        child = node.children.get(tokens[position : position + page_bytes])
        if child is None:
            break
        if not tokens.startswith(child.tokens, position):
            _hit_inside(child, tokens, position, page_bytes, hits)
            break
        node = child
        position += len(child.tokens)
    settled = set(hits)
    while True:
        if len(node.copies) > len(settled):
            _hit_at_end(node, tokens, position, page_bytes, hits, settled)
        position -= len(node.tokens)
        if node.parent is None:
            return hits
        node = node.parent


def _hit_inside(node: Node, tokens: bytes, start: int, page_bytes: int, hits: dict[str, Hit]) -> None:
    """The tokens leave `node` after at least one page: all its holders hold the same of them."""
    common = common_tokens(node.tokens, tokens, start)
    node_pages = common * TOKEN_BYTES // page_bytes
    hit = Hit(start // page_bytes + node_pages, node, node_pages, b"", start // TOKEN_BYTES + common)
    for worker in node.copies:
        hits[worker] = hit


def _hit_at_end(
    node: Node, tokens: bytes, position: int, page_bytes: int, hits: dict[str, Hit], settled: set[str]
) -> None:
    """Workers that hold all of `node` and no whole page further: a child's first page may hold a few tokens more."""
    start, num_pages, node_pages = position // TOKEN_BYTES, position // page_bytes, len(node.tokens) // page_bytes
    probe = Probe(tokens[position : position + page_bytes])
    for worker, copy in node.copies.items():
        if worker in settled:
            continue
        settled.add(worker)
        hit = Hit(num_pages, node, node_pages, b"", start, probe, copy.keys)
        if position or hit.num_tokens:
            hits[worker] = hit


def what_followed(root: Node, tokens: bytes, page_bytes: int, worker: str, limit: int) -> bytes:
    """The tokens behind `tokens` on the worker's most recently used path, at most `limit` bytes."""
    node, position = root, 0
    child: Node | None
    while len(tokens) - position >= page_bytes:
        child = node.children.get(tokens[position : position + page_bytes])
        if child is None or worker not in child.copies:
            return b""
        if not tokens.startswith(child.tokens, position):
            rest = tokens[position:]
            return _collect(child, len(rest), worker, limit) if child.tokens.startswith(rest) else b""
        node = child
        position += len(child.tokens)
    child = _last_used(node, tokens[position:], worker)
    return _collect(child, len(tokens) - position, worker, limit) if child is not None else b""


def _collect(child: Node, skip: int, worker: str, limit: int) -> bytes:
    """The tokens of `child` but the first `skip` bytes, and of those last used behind it."""
    found = bytearray(child.tokens[skip:])
    following = _last_used(child, b"", worker)
    while following is not None and len(found) < limit:
        found += following.tokens
        following = _last_used(following, b"", worker)
    return bytes(found[:limit])


def _last_used(node: Node, rest: bytes, worker: str) -> Node | None:
    """Of the worker's children that begin with `rest` and go on, one used last."""
    copy = node.copies.get(worker)
    if copy is None:
        return None
    place = bisect_left(copy.keys, rest)
    alike = [key for key in copy.keys[place : place + MAX_COMPARED] if key.startswith(rest) and len(key) > len(rest)]
    children = [node.children[key] for key in alike]
    return max(children, key=lambda child: child.copies[worker].last_used, default=None)
