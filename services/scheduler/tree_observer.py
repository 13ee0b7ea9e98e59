"""What somebody who follows the radix tree is told; leaves what becomes of it to the observer, here kv_events."""

from __future__ import annotations

from array import array
from typing import Protocol


class TreeObserver(Protocol):
    """Called within every change of the tree, once for each run of pages. Costs nothing where there is none."""

    def joined(self, worker: str) -> None: ...

    def left(self, worker: str) -> None:
        """All its pages are gone."""
        ...

    def stored(
        self, worker: str, namespace: bytes, before: int, tokens: bytes, pages: array[int], ready_step: int
    ) -> None:
        """Pages that hold `tokens` follow the page `before` (-1: the root), filled by the step `ready_step`."""
        ...

    def removed(self, worker: str, pages: array[int]) -> None: ...
