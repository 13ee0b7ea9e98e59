"""Says how far a long load is, and nothing of a short one. Leaves loading to whoever calls it."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

EVERY_S = 2.0

log = structlog.get_logger()


class LoadProgress:
    """A log line at most every two seconds; `clock` in seconds."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._done = 0
        self._clock = clock
        self._said = clock()

    def add(self, tensors: int) -> None:
        """So many more of the checkpoint's tensors are in place."""
        self._done += tensors
        now = self._clock()
        if now - self._said >= EVERY_S and self._done < self._total:
            self._said = now
            log.info("loading weights", percent=int(100 * self._done / self._total))
