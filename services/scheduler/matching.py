"""One walk of the tree that finds every worker's longest prefix. Leaves locks to the tree; changes nothing."""

from __future__ import annotations

from services.scheduler.lease import Hit
from services.scheduler.node import TOKEN_BYTES, Node, Probe, common_tokens


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
