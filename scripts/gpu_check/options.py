"""What a check is given, and how it fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.gpu_check.player import Player


class CheckFailed(AssertionError):
    """What was expected, and what came."""


@dataclass(frozen=True, slots=True)
class Options:
    model: str
    device: str
    quick: bool
    attention: str

    def prompts(
        self, number: int, length: int, vocab: int, *, shares: Sequence[tuple[range, int]] = ()
    ) -> list[list[int]]:
        """Random tokens, the same in every run, after (prompts, tokens): whose first so many tokens are equal.

        These are nested, the outer before the inner.
        """
        rng = np.random.default_rng(number)
        prefixes: list[list[int]] = [[] for _ in range(number)]
        for members, tokens in shares:
            start = prefixes[members.start]
            prefix = [*start, *rng.integers(3, vocab, tokens - len(start)).tolist()]
            for row in members:
                prefixes[row] = prefix
        lengths = rng.integers(max(1, length // 2), length + 1, number)
        return [
            [*prefix, *rng.integers(3, vocab, size).tolist()] for prefix, size in zip(prefixes, lengths, strict=True)
        ]

    @property
    def dtype(self) -> str:
        """What the device is for; on a CPU the same checks are sharper in fp32."""
        return "bfloat16" if self.device == "cuda" else "float32"

    def player(self, dtype: str = "", **flags: Any) -> Player:
        quick = {"max_total_tokens": 8192, "max_running_requests": 16, "threads": 1}
        sizes = quick if self.quick else {"max_total_tokens": 131072, "max_running_requests": 64}
        more = {
            "attention_backend": self.attention,
            "dtype": dtype or self.dtype,
            "context_length": 2048,
            **sizes,
            **flags,
        }
        return Player(self.model, self.device, **more)

    @property
    def rows(self) -> int:
        return 6 if self.quick else 24

    @property
    def count(self) -> int:
        return 12 if self.quick else 48
