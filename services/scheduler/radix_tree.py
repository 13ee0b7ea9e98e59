"""The global radix tree: which worker holds which pages of which tokens. Leaves free pages to the pools.

One tree for all workers of the fleet, single-threaded and synchronous. A request leases a path (`acquire`), gives the
pages it fills to the tree (`extend`), and lets go (`release`); pages nobody leases go in order of last use (`evict`).
Pages come back to the caller by `evict`, `clear`, `take_freed` and as the refused pages of `extend`, nowhere else.

The radix tree as a prefix cache with LRU over leaves: Zheng et al., "SGLang: Efficient Execution of Structured
Language Model Programs" (2024).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from services.scheduler.eviction import WorkerCache
from services.scheduler.insertion import Insertion
from services.scheduler.lease import Hit, Lease, Match
from services.scheduler.matching import find_hits, what_followed
from services.scheduler.node import TOKEN_BYTES, Copy, Node
from services.scheduler.node_store import NodeStore
from services.scheduler.tree_check import audit
from services.scheduler.tree_observer import TreeObserver

__all__ = ["Evicted", "Hit", "Lease", "Match", "RadixTree"]


class Evicted(NamedTuple):
    """All full pages of a path whose end is evicted, from the first token on."""

    namespace: bytes
    tokens: bytes
    pages: array[int]


class RadixTree:
    """Tokens are int32 little endian bytes; pages are ids of one worker; workers are named "id/incarnation".

    Disabled, it matches nothing and takes no page; everything else stays the same for its users.
    """

    def __init__(self, page_size: int = 16, *, enabled: bool = True) -> None:
        if page_size < 1:
            raise ValueError(f"page_size is {page_size}")
        self.page_size = page_size
        self.enabled = enabled
        self.observer: TreeObserver | None = None  # to be set before the first worker joins
        self._store = NodeStore(page_size)
        self._caches = self._store.caches
        self._clock = 0  # LRU stamps; grows with every call that changes anything

    @property
    def num_nodes(self) -> int:
        return self._store.num_nodes

    @property
    def workers(self) -> tuple[str, ...]:
        return tuple(self._caches)

    def add_worker(self, worker: str, *, observed: bool = True) -> None:
        """ValueError where it is known already. The observer hears nothing of one that is not `observed`."""
        if worker in self._caches:
            raise ValueError(f"worker {worker} is in the tree already")
        observer = self.observer if observed else None
        self._caches[worker] = WorkerCache(worker, observer)
        if observer is not None:
            observer.joined(worker)
        self._clock += 1

    def drop_worker(self, worker: str) -> None:
        """Forget all its copies; its leases become void. Unknown workers are ignored."""
        cache = self._caches.pop(worker, None)
        if cache is not None:
            cache.alive = False
            self._store.drop(cache)
            if cache.observer is not None:
                cache.observer.left(worker)
            self._clock += 1

    def match(self, namespace: bytes, tokens: bytes) -> Match:
        """The longest prefix of `tokens` each worker holds, token-granular. Changes nothing.

        Whole tokens only; the caller cuts off what must be computed anyway (the last token).
        """
        root = self._store.roots.get(namespace) if self.enabled else None
        hits = find_hits(root, tokens, self._store.page_bytes) if root else {}
        return Match(namespace, tokens, hits, self._store.version)

    def foresee(self, namespace: bytes, tokens: bytes, worker: str, limit: int) -> bytes:
        """What came after `tokens` when they were last used there, at most `limit` tokens. Changes nothing."""
        root = self._store.roots.get(namespace) if self.enabled else None
        return what_followed(root, tokens, self._store.page_bytes, worker, limit * TOKEN_BYTES) if root else b""

    def acquire(self, match: Match, worker: str) -> Lease:
        """Lock what the worker holds of the match. Without a hit the lease is empty. KeyError: unknown worker.

        A match that is older than the last change of the tree is made again.
        """
        cache = self._caches[worker]
        if not self.enabled:
            return Lease(worker, match.namespace, Node(b"", match.namespace, None), None, self.page_size)
        if match.version != self._store.version:
            match = self.match(match.namespace, match.tokens)
        hit = match.hits.get(worker)
        num_tokens = match.num_tokens(worker)
        if hit is None:
            node = self._store.root_copy(match.namespace, cache).node
            source = None
        elif hit.node_pages * self._store.page_bytes < len(hit.node.tokens):
            node, source = self._store.split(hit.node, hit.node_pages), hit.node
        else:
            node, source = hit.node, hit.node.children.get(hit.source_key)
        lease = Lease(worker, match.namespace, node, cache, self.page_size)
        cache.leases.add(lease)
        self._lock_path(lease, cache)
        if source and num_tokens > lease.num_tokens:
            lease.source = source.copies[worker]
            lease.copy_source = lease.source.pages[0]
            lease.copy_tokens = num_tokens - lease.num_tokens
            cache.pin(lease.source)
        return lease

    def _lock_path(self, lease: Lease, cache: WorkerCache) -> None:
        self._clock += 1
        path: list[array[int]] = []
        node: Node | None = lease.node
        while node is not None:
            copy = node.copies[lease.worker]
            cache.lock(copy, self._clock)
            path.append(copy.pages)
            node = node.parent
        for pages in reversed(path):
            lease.pages += pages

    def release(self, lease: Lease) -> None:
        """Unlock the lease's path; its tail page is the tree's from now on. Idempotent."""
        if lease.released:
            return
        lease.released = True
        cache = lease.cache
        if cache is None or not cache.alive:
            return
        self._clock += 1
        self._unpin(lease, cache)
        cache.leases.remove(lease)
        tail, lease.tail = lease.tail, None
        if tail is not None:
            cache.unlock(tail, self._clock)
        node: Node | None = lease.node
        root = lease.node
        while node is not None:
            cache.unlock(node.copies[lease.worker], self._clock)
            root, node = node, node.parent
        if tail is not None and tail.evictable and self._store.is_redundant(tail, cache):
            cache.freed.extend(self._store.unlink(tail, cache))
        elif root is lease.node:
            self._store.prune_root(root, cache.worker)

    def forget_copy(self, lease: Lease) -> None:
        """Do without the page to copy: it may be evicted at once."""
        if lease.cache is not None and lease.cache.alive:
            self._unpin(lease, lease.cache)
            self._clock += 1
        lease.copy_source, lease.copy_tokens = -1, 0

    def _unpin(self, lease: Lease, cache: WorkerCache) -> None:
        source, lease.source = lease.source, None
        if source is not None:
            cache.unpin(source)

    def extend(self, lease: Lease, tokens: bytes, pages: Sequence[int], ready_step: int = -1) -> list[int]:
        """Give the tree the pages that hold `tokens`, which are all tokens from position `lease.num_tokens` on.

        Full pages move the lease down. A last partial page becomes the lease's tail: the request goes on writing
        into it and brings it again as the first page, with more tokens. Returns the pages that the tree did not
        take because that worker's copy of these tokens exists; they stay the request's own. `ready_step` is the
        step that fills the pages. ValueError: pages and tokens do not fit each other or the lease.
        """
        given = array("i", pages)
        if lease.released:
            raise ValueError("the lease was released")
        if len(given) != -(-len(tokens) // self._store.page_bytes) or len(tokens) % TOKEN_BYTES:
            raise ValueError(f"{len(given)} pages for {len(tokens)} bytes of tokens")
        cache = lease.cache
        if cache is None or not cache.alive:
            return given.tolist()
        tail = lease.tail
        if tail is not None and not self._tail_grows(tail, tokens, given, cache):
            return []
        self._clock += 1
        self._unpin(lease, cache)
        if tail is not None:
            self._store.unlink(tail, cache)
            lease.tail, lease.tail_page, lease.tail_tokens = None, -1, 0
        return Insertion(self._store, cache, lease, self._clock, ready_step, tail).run(tokens, given)

    def _tail_grows(self, tail: Copy, tokens: bytes, pages: array[int], cache: WorkerCache) -> bool:
        """False where nothing is new, or where another page that is there holds these tokens: then it stays."""
        known = tail.node.tokens
        if len(tokens) <= len(known):
            if not known.startswith(tokens):
                raise ValueError("these tokens are not those of the tail page")
            return False
        if pages[0] != tail.pages[0] or not tokens.startswith(known):
            raise ValueError("the tail page comes first, with the tokens it had and more")
        if len(tokens) >= self._store.page_bytes:
            return True
        parent = tail.node.parent
        assert parent is not None, "a tail has a parent"
        return not parent.copies[cache.worker].holds(tokens)

    def evictable_pages(self, worker: str) -> int:
        """How many pages `evict` can free there."""
        return self._caches[worker].evictable

    def cached_pages(self, worker: str) -> int:
        """How many pages the tree holds there, those of live leases included."""
        return self._caches[worker].cached

    def evict(self, worker: str, num_pages: int, gone: list[Evicted] | None = None) -> list[int]:
        """Free `num_pages` pages, or all evictable ones where these are fewer: least recently used leaves from
        their ends. O(log nodes) for each leaf that goes; `gone`, where given, learns what each one held.
        """
        cache = self._caches[worker]
        freed: list[int] = []
        self._clock += 1
        while len(freed) < num_pages:
            copy = cache.least_recently_used()
            if copy is None:
                break
            if gone is not None and len(copy.node.tokens) >= self._store.page_bytes:
                gone.append(self._path_to(copy, worker))
            freed += self._store.trim(copy, min(copy.spare, num_pages - len(freed)), cache)
        return freed

    @staticmethod
    def _path_to(copy: Copy, worker: str) -> Evicted:
        nodes = [copy.node]
        while nodes[-1].parent is not None:
            nodes.append(nodes[-1].parent)
        nodes.reverse()
        pages: array[int] = array("i")
        for node in nodes:
            pages += node.copies[worker].pages
        return Evicted(nodes[0].key, b"".join(node.tokens for node in nodes), pages)

    def clear(self, worker: str) -> list[int]:
        """Forget every unlocked page of the worker; returns them."""
        return self.evict(worker, self._caches[worker].evictable)

    def take_freed(self, worker: str) -> list[int]:
        """Pages the tree gave back by itself since the last call; they may be reused from the next command on."""
        cache = self._caches.get(worker)
        if cache is None:
            return []
        freed, cache.freed = cache.freed, []
        return freed

    def pages_of(self, worker: str) -> Iterator[int]:
        """Every page the tree holds there, in no particular order."""
        return chain.from_iterable(copy.pages for copy in self._store.copies_of(worker))

    def check(self) -> None:
        """All invariants at once; AssertionError names what is wrong."""
        for _ in self.audit():
            pass

    def audit(self) -> Iterator[None]:
        """`check` in small pieces, for idle time: ends early, without a verdict, where the tree changes meanwhile."""
        begun = self._clock
        for _ in audit(self._store):
            yield
            if self._clock != begun:
                return
