"""Progress for a person who waits: one line per event on stderr; leaves logs to the services."""

from __future__ import annotations

import sys
from collections.abc import Callable

Progress = Callable[[str], None]


def to_stderr(line: str) -> None:
    sys.stderr.write(f"radixfleet: {line}\n")
    sys.stderr.flush()


def silent(line: str) -> None:
    del line


class Percent:
    """Says `label: N%` for every tenth of a known total."""

    def __init__(self, label: str, total: int, say: Progress) -> None:
        self._label = label
        self._total = max(total, 1)
        self._say = say
        self._done = 0
        self._tenths = 0

    def add(self, amount: int) -> None:
        self._done += amount
        tenths = min(10, self._done * 10 // self._total)
        if tenths > self._tenths:
            self._tenths = tenths
            self._say(f"{self._label}: {tenths * 10}%")
