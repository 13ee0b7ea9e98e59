"""Token counts as every endpoint reports them; cached prompt tokens are always part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Counts:
    """Counts of one HTTP request: each prompt once, every choice's output."""

    def __init__(self, prompt_lengths: Sequence[int], n: int) -> None:
        self._prompt_tokens = sum(prompt_lengths)
        self._n = n
        self._completion = [0] * (len(prompt_lengths) * n)
        self._cached = [0] * len(prompt_lengths)
        self._reasoning = [0] * (len(prompt_lengths) * n)

    def note(self, index: int, num_output_tokens: int, cached_tokens: int) -> None:
        self._completion[index] = num_output_tokens
        if index % self._n == 0:  # the first choice of a prompt shows what was cached before the request
            self._cached[index // self._n] = cached_tokens

    def note_reasoning(self, index: int, num_tokens: int) -> None:
        """How many of a choice's tokens are reasoning."""
        self._reasoning[index] = num_tokens

    @property
    def prompt_tokens(self) -> int:
        return self._prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return sum(self._completion)

    @property
    def cached_tokens(self) -> int:
        return sum(self._cached)

    @property
    def reasoning_tokens(self) -> int:
        return sum(self._reasoning)

    def usage(self) -> dict[str, Any]:
        completion, reasoning = self.completion_tokens, self.reasoning_tokens
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self._prompt_tokens + completion,
            "reasoning_tokens": reasoning,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": reasoning},
        }
