"""The radix tree as plainly as can be: one dict of token sequences per worker, searched from end to end.

The judge of the state machine. A page is known by all tokens from the start of the text to its end; its content is,
for every token in it, everything a KV entry depends on: the namespace and all tokens up to there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.page_pool import PagePool
from services.scheduler.radix_tree import Lease

Tokens = tuple[int, ...]
Key = tuple[bytes, Tokens]  # namespace, all tokens up to the end of a page


@dataclass(eq=False)
class ModelLease:
    key: Key  # tokens of the full shared pages
    tail: Key | None = None
    pinned: int = -1  # a page


@dataclass
class ModelWorker:
    """What the tree should hold on one worker."""

    page_size: int
    num_pages: int
    pool: PagePool = field(init=False)
    pages: dict[Key, int] = field(default_factory=dict)
    last_used: dict[Key, int] = field(default_factory=dict)
    leases: list[ModelLease] = field(default_factory=list)
    contents: dict[int, list[Key]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pool = PagePool(self.num_pages)

    def longest(self, namespace: bytes, tokens: Tokens) -> tuple[int, int, set[int]]:
        """Tokens held, full pages among them, and the pages that hold what follows those."""
        size, full = self.page_size, 0
        while (full + 1) * size <= len(tokens) and (namespace, tokens[: (full + 1) * size]) in self.pages:
            full += 1
        best, sources = full * size, set[int]()
        for (space, held), page in self.pages.items():
            if space != namespace or not full * size < len(held) <= (full + 1) * size:
                continue
            common = common_length(held, tokens)
            if common > max(best, full * size):
                best, sources = common, set()
            if common == best > full * size:
                sources.add(page)
        return best, full, sources

    def locks(self, key: Key) -> int:
        if len(key[1]) % self.page_size:
            return sum(lease.tail == key for lease in self.leases)
        return sum(is_prefix(key, lease.key) for lease in self.leases)

    def pinned(self) -> set[int]:
        return {lease.pinned for lease in self.leases} & set(self.pages.values())

    def evictable(self) -> int:
        pinned = self.pinned()
        return sum(not self.locks(key) and page not in pinned for key, page in self.pages.items())

    def holds(self, key: Key) -> bool:
        """Whether one page holds these tokens up to their end."""
        size = self.page_size
        page_of = (len(key[1]) - 1) // size
        return any(is_prefix(key, other) and (len(other[1]) - 1) // size == page_of for other in self.pages)

    def extend(self, lease: ModelLease, tokens: Tokens, pages: list[int]) -> list[int]:
        """Adopts what is new; returns the refused pages."""
        size, (namespace, base) = self.page_size, lease.key
        lease.pinned, former = -1, -1
        if lease.tail is not None:
            whole = (namespace, base + tokens)
            if is_prefix(whole, lease.tail) or (len(tokens) < size and self.holds(whole)):
                return []
            former = self.pages.pop(lease.tail)
            lease.tail = None
        refused: list[int] = []
        for index, page in enumerate(pages):
            key = (namespace, base + tokens[: (index + 1) * size])
            is_full = (index + 1) * size <= len(tokens)
            if self.holds(key):
                refused.append(page)
            else:
                self.pages[key] = page
                lease.tail = None if is_full else key
            if is_full:
                lease.key = key
        if former in refused:
            for other in self.leases:  # the page is its request's again, who frees it when its slot closes
                other.pinned = -1 if other.pinned == former else other.pinned
        return refused

    def release(self, lease: ModelLease, now: int) -> None:
        for key in self.pages:
            if key == lease.tail or (len(key[1]) % self.page_size == 0 and is_prefix(key, lease.key)):
                self.last_used[key] = now
        self.leases.remove(lease)

    def forget_redundant(self, freed: list[int]) -> None:
        """The tree gave `freed` back: each must have been of no use to anybody."""
        pinned = self.pinned()
        for page in freed:
            key = next(key for key, held in self.pages.items() if held == page)
            assert len(key[1]) % self.page_size, "a full page is never redundant"
            assert not self.locks(key), "a locked page was freed"
            assert page not in pinned, "a page about to be copied was freed"
            del self.pages[key]
            assert self.holds(key), "the page was the only one with these tokens"

    def evict(self, count: int) -> set[int]:
        """One page after the other: the least recently used one that nothing follows."""
        evicted = set[int]()
        pinned = self.pinned()
        while len(evicted) < count:
            ends = [key for key, page in self.pages.items() if page not in pinned and self.is_end(key)]
            if not ends:
                break
            evicted.add(self.pages.pop(min(ends, key=lambda key: self.last_used[key])))
        return evicted

    def is_end(self, key: Key) -> bool:
        """Whether nobody locks the page and no page follows it."""
        if self.locks(key):
            return False
        return bool(len(key[1]) % self.page_size) or not any(
            other != key and is_prefix(key, other) for other in self.pages
        )


def is_prefix(short: Key, long: Key) -> bool:
    return short[0] == long[0] and long[1][: len(short[1])] == short[1]


def common_length(one: Tokens, other: Tokens) -> int:
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length


@dataclass(eq=False)
class ModelRequest:
    """A running request: its text so far, its page table, and which of those pages are its own."""

    worker: str
    namespace: bytes
    tokens: Tokens  # whose KV is computed
    prompt: Tokens
    table: list[int]
    own: set[int]
    lease: Lease
    model_lease: ModelLease
