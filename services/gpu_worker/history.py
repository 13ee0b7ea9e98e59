"""How often each token occurred in one request, kept sparse because a request sees few of a vocabulary's tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_INITIAL = 64


class History:
    """Distinct tokens of prompt and output and how often the output holds each; positions are absolute."""

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._index: dict[int, int] = {}
        self._ids = np.zeros(_INITIAL, dtype=np.int64)
        self._counts = np.zeros(_INITIAL, dtype=np.float32)
        self.known = 0  # positions 0 .. known - 1 are counted
        self.addresses = self._ids.ctypes.data, self._counts.ctypes.data
        """Where `ids` and `output_counts` begin in memory, until they grow."""

    def __len__(self) -> int:
        """How many distinct tokens."""
        return len(self._index)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Distinct tokens so far, in order of appearance."""
        return self._ids[: len(self._index)]

    @property
    def output_counts(self) -> NDArray[np.float32]:
        """How often the output holds each of `ids`; 0 for tokens only the prompt has."""
        return self._counts[: len(self._index)]

    def extend(self, start: int, tokens: list[int]) -> bool:
        """Count `tokens` at positions start, start + 1, ...; positions that were counted before are left out.

        Whether there is a token that was not seen before.
        """
        seen = len(self._index)
        for token in tokens[max(self.known - start, 0) :]:
            self._add(token)
        return len(self._index) > seen

    def _add(self, token: int) -> None:
        at = self._index.get(token)
        if at is None:
            at = self._index[token] = len(self._index)
            if at == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
                self.addresses = self._ids.ctypes.data, self._counts.ctypes.data
            self._ids[at] = token
        if self.known >= self._prompt_length:
            self._counts[at] += 1.0
        self.known += 1
