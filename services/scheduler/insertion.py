"""One extend: a request's pages go into the tree below its lease. Leaves checks of the arguments to the tree.

lease.node -- [walk: pages that are there already, or on other workers only] -- [append: new] -- [tail: < 1 page]
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from services.scheduler.eviction import WorkerCache
from services.scheduler.lease import Lease
from services.scheduler.node import TOKEN_BYTES, Copy, Node, common_tokens
from services.scheduler.node_store import NodeStore


@dataclass(slots=True)
class Insertion:
    store: NodeStore
    cache: WorkerCache
    lease: Lease
    stamp: int
    ready_step: int
    # The lease's former tail, out of the tree by now. It becomes the copy that holds its page again, since other
    # leases may have pinned it.
    former_tail: Copy | None = None
    refused: list[int] = field(default_factory=list)

    def run(self, tokens: bytes, pages: array[int]) -> list[int]:
        """Moves the lease down over all of `tokens`; returns the pages the tree did not take."""
        page_bytes = self.store.page_bytes
        full = len(tokens) // page_bytes
        done = self._walk(tokens, pages, full)
        if done < full:
            self._append(tokens[done * page_bytes : full * page_bytes], pages[done:full])
        if len(pages) > full:
            self._add_tail(tokens[full * page_bytes :], pages[full])
        return self.refused

    def _walk(self, tokens: bytes, pages: array[int], full: int) -> int:
        """Follow nodes that are there, whoever holds them; returns the number of pages passed."""
        page_bytes = self.store.page_bytes
        done = 0
        while done < full:
            start = done * page_bytes
            child = self.lease.node.children.get(tokens[start : start + page_bytes])
            if child is None:
                break
            # Up to the page border: a request's path may leave a node in its middle, even in the middle of a page.
            count = common_tokens(child.tokens, tokens, start) // self.store.page_size
            if count * page_bytes < len(child.tokens):
                child = self.store.split(child, count)
            self._enter(child, pages[done : done + count])
            done += count
        return done

    def _enter(self, child: Node, pages: array[int]) -> None:
        copy = child.copies.get(self.cache.worker)
        if copy is None:
            self.store.free_redundant(self.lease.node, child.key, self.cache)
            self._link(child.tokens, pages)
            return
        self.refused.extend(pages)
        self.former_tail = None
        self.cache.lock(copy, self.stamp)
        self.lease.pages += copy.pages
        self.lease.node = child

    def _append(self, tokens: bytes, pages: array[int]) -> None:
        """New full pages: into the lease's node itself where that is its own leaf, else into children."""
        store, lease = self.store, self.lease
        store.free_redundant(lease.node, tokens[: store.page_bytes], self.cache)
        copy = lease.node.copies[self.cache.worker]
        done = min(store.room(copy), len(pages))
        if done:
            self._tell(tokens[: done * store.page_bytes], pages[:done])
            store.grow(copy, tokens[: done * store.page_bytes], pages[:done], self.cache)
            copy.last_used = self.stamp
            copy.ready_step = max(copy.ready_step, self.ready_step)
            lease.pages += pages[:done]
            self.former_tail = None
        while done < len(pages):
            end = min(done + store.max_node_pages, len(pages))
            self._link(tokens[done * store.page_bytes : end * store.page_bytes], pages[done:end])
            done = end

    def _add_tail(self, rest: bytes, page: int) -> None:
        lease = self.lease
        if lease.node.copies[self.cache.worker].holds(rest):
            self.refused.append(page)
            return
        self.store.free_redundant(lease.node, rest, self.cache)
        lease.tail = self._copy(array("i", (page,)))
        self.store.link(lease.node, rest, lease.tail, self.cache)
        lease.tail_page = page
        lease.tail_tokens = len(rest) // TOKEN_BYTES

    def _link(self, tokens: bytes, pages: array[int]) -> None:
        self._tell(tokens, pages)
        copy = self._copy(pages)
        self.lease.node = self.store.link(self.lease.node, tokens, copy, self.cache)
        self.lease.pages += pages

    def _tell(self, tokens: bytes, pages: array[int]) -> None:
        """These pages are about to follow the lease's node."""
        observer, worker = self.cache.observer, self.cache.worker
        if observer is not None:
            above = self.lease.node.copies[worker].pages
            before = above[-1] if above else -1
            observer.stored(worker, self.lease.namespace, before, tokens, pages, self.ready_step)

    def _copy(self, pages: array[int]) -> Copy:
        """A copy locked by this lease."""
        copy = self.former_tail or Copy(self.lease.node, pages, self.stamp)
        self.former_tail = None
        copy.pages = pages
        copy.lock_ref = 1
        copy.last_used = self.stamp
        copy.ready_step = self.ready_step
        return copy
