"""What the tree hands to its users: a match, its hits, and the lease a request holds. Only data."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from services.scheduler.node import Copy, Node, Probe

if TYPE_CHECKING:
    from services.scheduler.eviction import WorkerCache


class Hit(msgspec.Struct, eq=False, gc=False):
    """What one worker holds of the tokens: `num_pages` full shared pages, then tokens of a page that can be copied.

    How many tokens those are is found when somebody asks: most callers look at pages, or at one worker.
    """

    num_pages: int
    node: Node  # the deepest one whose pages are shared
    node_pages: int  # how many of that node's pages; the next one is copied where there is one,
    source_key: bytes  # else the first one of this child
    tokens: int  # so far
    probe: Probe | None = None  # to be asked for more
    keys: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """Right until the next change of the tree."""
        probe, self.probe = self.probe, None
        if probe is not None:
            self.source_key = probe.closest(self.keys)
            if self.source_key:
                self.tokens += probe.common
        return self.tokens


class Match(msgspec.Struct, eq=False, gc=False):
    namespace: bytes
    tokens: bytes
    hits: dict[str, Hit]
    version: int  # of the tree it was made from

    def num_tokens(self, worker: str) -> int:
        hit = self.hits.get(worker)
        return hit.num_tokens if hit else 0


@dataclass(slots=True, eq=False)
class Lease:
    """A request's (or a transfer's) hold on a path of the tree on one worker.

    `pages` are the tree's full pages from position 0 in order. `tail_page` is a partly filled page of the request
    itself which the tree knows `tail_tokens` tokens of. `copy_source` is a page whose first `copy_tokens` tokens
    follow the shared ones; the tree evicts it only after the lease's first extend, release or forget_copy, so the
    copy must be in a command that leaves before those, or with them.
    """

    worker: str
    namespace: bytes
    node: Node = field(repr=False)
    cache: WorkerCache | None = field(repr=False)
    page_size: int = field(repr=False)
    pages: array[int] = field(default_factory=lambda: array("i"))
    tail_page: int = -1
    tail_tokens: int = 0
    copy_source: int = -1
    copy_tokens: int = 0
    tail: Copy | None = field(default=None, repr=False)
    source: Copy | None = field(default=None, repr=False)
    released: bool = False

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    @property
    def num_tokens(self) -> int:
        return len(self.pages) * self.page_size

    @property
    def void(self) -> bool:
        """The worker was dropped (or the tree is disabled): there is nothing to hold."""
        return self.cache is None or not self.cache.alive
