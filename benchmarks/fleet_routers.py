"""Routers in front of engines that know nothing of each other, to compare one scheduler for all with.

`ApproximateTree` is what a router can do that only sees the prompts it sent: it remembers them in a tree of its own and
guesses from it what each engine still has. Thresholds are the defaults of SGLang's router.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Protocol

BLOCK_BYTES = 16 * 4
CACHE_THRESHOLD = 0.3
BALANCE_ABS = 64
BALANCE_REL = 1.5
MAX_BLOCKS = (1 << 26) // 16
EVICTION_S = 60.0


class Router(Protocol):
    def choose(self, prompt: bytes) -> int: ...

    def finished(self, engine: int) -> None: ...


class RoundRobin:
    def __init__(self, engines: int) -> None:
        self._next = itertools.cycle(range(engines))

    def choose(self, prompt: bytes) -> int:
        return next(self._next)

    def finished(self, engine: int) -> None:
        """It does not look."""


class ApproximateTree:
    """Longest remembered prefix where loads are balanced, else the shortest queue."""

    def __init__(self, engines: int, now: Callable[[], float]) -> None:
        self._now = now
        self._load = [0] * engines
        self._blocks: list[dict[int, float]] = [{} for _ in range(engines)]  # prefix hash -> last use
        self._evicted_at = now()

    def choose(self, prompt: bytes) -> int:
        self._evict()
        prefixes = self._prefixes(prompt)
        engine = self._shortest() if self._imbalanced() else self._best(prefixes)
        self._load[engine] += 1
        self._blocks[engine].update(dict.fromkeys(prefixes, self._now()))
        return engine

    def finished(self, engine: int) -> None:
        self._load[engine] -= 1

    def _best(self, prefixes: list[int]) -> int:
        matches = [sum(1 for _ in itertools.takewhile(blocks.__contains__, prefixes)) for blocks in self._blocks]
        best = max(range(len(matches)), key=matches.__getitem__)
        if prefixes and matches[best] / len(prefixes) > CACHE_THRESHOLD:
            return best
        return min(range(len(self._blocks)), key=lambda engine: len(self._blocks[engine]))

    def _imbalanced(self) -> bool:
        most, least = max(self._load), min(self._load)
        return most - least > BALANCE_ABS and most > BALANCE_REL * least

    def _shortest(self) -> int:
        return min(range(len(self._load)), key=self._load.__getitem__)

    def _evict(self) -> None:
        if self._now() - self._evicted_at < EVICTION_S:
            return
        self._evicted_at = self._now()
        for blocks in self._blocks:
            if len(blocks) > MAX_BLOCKS:
                for prefix in sorted(blocks, key=blocks.__getitem__)[: len(blocks) - MAX_BLOCKS]:
                    del blocks[prefix]

    @staticmethod
    def _prefixes(prompt: bytes) -> list[int]:
        found, last = [], 0
        for start in range(0, len(prompt) - BLOCK_BYTES + 1, BLOCK_BYTES):
            last = hash((last, prompt[start : start + BLOCK_BYTES]))
            found.append(last)
        return found


class KeySpace:
    """Cells of schedulers: the first tokens of a prompt say which cell it belongs to, for good."""

    def __init__(self, cells: int, key_tokens: int) -> None:
        self._cells = cells
        self._key_bytes = key_tokens * 4
        self.sent: dict[int, int] = defaultdict(int)

    def choose(self, prompt: bytes) -> int:
        """Rendezvous hashing: of all cells the one whose hash with the key is highest keeps it as cells come and go."""
        key = prompt[: self._key_bytes]
        cell = max(range(self._cells), key=lambda number: hash((number, key)))
        self.sent[cell] += 1
        return cell

    def finished(self, engine: int) -> None:
        """Cells are not chosen by load."""
