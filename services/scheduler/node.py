"""Nodes of the radix tree, the workers' copies of them, and how tokens are compared. Leaves all rules to the tree.

Tokens are int32 bytes, so that slices, comparisons and dict keys are memcpy, memcmp and one hash.

    root -- [system prompt: 5 pages] --+-- [chat A: 3 pages] -- [2 tokens]      a partial page is a leaf of its own
             copies: w0, w1            |    copies: w0            copies: w0
                                       +-- [chat B: 7 pages]
                                            copies: w1                          a copy implies its parent's copy
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort

TOKEN_BYTES = 4
COMPARE_AT_ONCE = 64  # bytes: one xor finds the first difference among so few faster than bisection does


class Node:
    """`tokens` are whole pages, or less than one page in a leaf; `key` are those of its first page."""

    __slots__ = ("children", "copies", "key", "parent", "tokens")

    def __init__(self, tokens: bytes, key: bytes, parent: Node | None) -> None:
        self.tokens = tokens
        self.key = key
        self.parent = parent
        self.children: dict[bytes, Node] = {}
        self.copies: dict[str, Copy] = {}


class Copy:
    """One worker's pages of a node.

    `keys` are the sorted keys of the node's children that this worker holds too. `pins` counts leases that are
    about to copy the first page.
    """

    __slots__ = ("keys", "last_used", "lock_ref", "node", "pages", "pins", "queued", "ready_step")

    def __init__(self, node: Node, pages: array[int], last_used: int, ready_step: int = -1) -> None:
        self.node = node
        self.pages = pages
        self.last_used = last_used
        self.ready_step = ready_step
        self.lock_ref = 0
        self.pins = 0
        self.queued = False  # an entry in the worker's eviction queue stands for it
        self.keys: list[bytes] = []

    @property
    def spare(self) -> int:
        """Pages that may go once nobody locks the copy and the children are gone."""
        return len(self.pages) - 1 if self.pins and self.pages else len(self.pages)

    @property
    def evictable(self) -> bool:
        return not self.lock_ref and not self.keys and self.spare > 0

    def add_key(self, key: bytes) -> None:
        insort(self.keys, key)

    def remove_key(self, key: bytes) -> None:
        del self.keys[bisect_left(self.keys, key)]

    def holds(self, rest: bytes) -> bool:
        """Whether some child's first page starts with `rest`."""
        place = bisect_left(self.keys, rest)
        return place < len(self.keys) and self.keys[place].startswith(rest)

    def holds_more(self, key: bytes) -> bool:
        """Whether some child's first page starts with the child's key `key` and goes on."""
        place = bisect_right(self.keys, key)
        return place < len(self.keys) and self.keys[place].startswith(key)


def common_tokens(edge: bytes, tokens: bytes, start: int) -> int:
    """How many tokens `edge` and `tokens[start:]` have in common at their beginning; `start` in bytes.

    Bisection compares each byte about twice, and none in Python.
    """
    low, high = 0, len(tokens) - start
    if len(edge) > high:
        equal = edge.startswith(tokens[start:])
    else:
        high = len(edge)
        equal = tokens.startswith(edge, start)
    if equal:
        return high // TOKEN_BYTES
    while high - low > COMPARE_AT_ONCE:
        middle = (low + high) // 2
        if tokens.startswith(edge[low:middle], start + low):
            low = middle
        else:
            high = middle
    one = int.from_bytes(edge[low:high], "little")
    other = int.from_bytes(tokens[start + low : start + high], "little")
    lowest_bits = (one ^ other) & -(one ^ other)
    return (low + (lowest_bits.bit_length() - 1) // 8) // TOKEN_BYTES


class Probe:
    """Searches sorted keys for the longest common prefix with the tokens of one page.

    Often all workers hold equally many of them, up to where a template ends and each user's own words begin: so
    the length found last is tried first.
    """

    __slots__ = ("_less", "_more", "_rest", "common")

    def __init__(self, rest: bytes) -> None:
        self._rest = rest
        self._expect(0)

    def _expect(self, common: int) -> None:
        self.common = common  # in tokens
        self._less = self._rest[: common * TOKEN_BYTES]
        self._more = self._rest[: (common + 1) * TOKEN_BYTES]

    def closest(self, keys: list[bytes]) -> bytes:
        """The key with the longest common prefix, whose length `common` is then; empty if none has any.

        In byte order it stands right before or right after the tokens.
        """
        if not keys:
            return b""
        place = bisect_left(keys, self._rest)
        best = keys[min(place, len(keys) - 1)]
        if best.startswith(self._more) or not best.startswith(self._less):
            self._expect(common_tokens(best, self._rest, 0))
        if place and keys[place - 1].startswith(self._more):
            best = keys[place - 1]
            self._expect(common_tokens(best, self._rest, 0))
        return best if self.common else b""
