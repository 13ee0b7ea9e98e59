"""The free pages of one worker. Leaves to the tree and the requests what the others hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class PagePool:
    """Page ids 0 .. num_pages - 1; each is free or somebody's.

    `hidden`: pages with which the worker keeps a token's hidden state, and how many of the page's tokens end with it.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 0:
            raise ValueError(f"num_pages is {num_pages}")
        self.num_pages = num_pages
        # A stack that hands out ascending ids first: neighbours in a page table are neighbours in memory.
        self._stack = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_pages)
        self.hidden: dict[int, int] = {}

    @property
    def free(self) -> int:
        return len(self._stack)

    def is_free(self, page: int) -> bool:
        return 0 <= page < self.num_pages and bool(self._is_free[page])

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None where fewer are free; never a part of them."""
        if count < 0:
            raise ValueError(f"cannot allocate {count} pages")
        if count > len(self._stack):
            return None
        cut = len(self._stack) - count
        pages = self._stack[cut:]
        del self._stack[cut:]
        pages.reverse()
        for page in pages:
            self._is_free[page] = 0
        return pages

    def claim(self, pages: Iterable[int]) -> list[int]:
        """Those of `pages` that are free and hereby are somebody's."""
        claimed = [page for page in dict.fromkeys(pages) if self.is_free(page)]
        for page in claimed:
            self._is_free[page] = 0
        self._stack = [page for page in self._stack if self._is_free[page]]
        return claimed

    def release(self, pages: Iterable[int]) -> None:
        """Raises ValueError for a page that is free already, unknown or named twice; then nothing is released."""
        returned = list(pages)
        wrong = [page for page in returned if not 0 <= page < self.num_pages or self._is_free[page]]
        if wrong:
            raise ValueError(f"pages {wrong[:8]} are not held by anybody")
        if len(set(returned)) != len(returned):
            twice = [page for page, times in Counter(returned).items() if times > 1]
            raise ValueError(f"pages {twice[:8]} are named twice")
        for page in returned:
            self._is_free[page] = 1
            self.hidden.pop(page, None)
        returned.reverse()
        self._stack += returned

    def copied(self, source: int, target: int, num_tokens: int) -> None:
        """The worker copies a page, of which `num_tokens` tokens count, and with it the state it keeps."""
        if 0 < self.hidden.get(source, 0) <= num_tokens:
            self.hidden[target] = self.hidden[source]

    def check(self) -> None:
        """AssertionError where the stack and the flags disagree, or a state is kept with a page of nobody."""
        assert not any(self._is_free[page] for page in self.hidden), "a free page has a hidden state"
        assert len(self._stack) == sum(self._is_free), "the number of free pages is wrong"
        assert all(self._is_free[page] for page in self._stack), "a held page is on the stack"
        assert len(set(self._stack)) == len(self._stack), "a page is on the stack twice"
