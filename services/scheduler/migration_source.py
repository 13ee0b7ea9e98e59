"""Who could give the pages that a worker lacks. Leaves whether that is worth it to placement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from services.scheduler.lease import Hit
from services.scheduler.node import Node
from services.scheduler.worker import Worker


class Source(NamedTuple):
    """`pages` full pages from the first token on that no step in flight writes any more."""

    worker: Worker
    key: str  # in the tree
    pages: int
    tier: Literal["", "host", "disk"] = ""  # of the worker that wants them


def best_source(workers: Iterable[Worker], hits: Mapping[str, Hit]) -> Source | None:
    """The longest ready prefix; of equal ones that of the worker with the fewest transfers."""
    best: Source | None = None
    for worker in workers:
        hit = hits.get(worker.key)
        if hit is None or not worker.hello.kv_endpoints:
            continue
        pages = ready_pages(hit, worker.key, worker.settled_step)
        if pages and (best is None or _rank(pages, worker) > _rank(best.pages, best.worker)):
            best = Source(worker, worker.key, pages)
    return best


def tier_sources(worker: Worker, hits: Mapping[str, Hit]) -> list[Source]:
    """What the worker's own tiers could give back."""
    found = []
    for tier in worker.tiers.values():
        hit = hits.get(tier.key)
        pages = ready_pages(hit, tier.key, tier.settled) if hit is not None else 0
        if pages:
            found.append(Source(worker, tier.key, pages, tier.name))
    return found


def ready_pages(hit: Hit, key: str, settled_step: int) -> int:
    """How many of the hit's shared pages hold what they should: the step that fills each has come back."""
    path: list[Node] = []
    node: Node | None = hit.node
    while node is not None:
        path.append(node)
        node = node.parent
    ready = 0
    for node in reversed(path):
        copy = node.copies[key]
        if copy.ready_step > settled_step:
            break
        ready += len(copy.pages)
    return min(ready, hit.num_pages)


def _rank(pages: int, worker: Worker) -> tuple[int, int]:
    return pages, -len(worker.transfers)
