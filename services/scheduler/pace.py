"""How fast a worker's steps bring tokens, of late. Leaves what to do with it to others."""

from __future__ import annotations

FORGET = 0.95
"""Weight of a step after the next one: about the last 20 count."""
PAUSE_MS = 1.5
"""What a worker waits for its next step when that is planned after the result."""


class Pace:
    __slots__ = ("_ms", "_tokens")

    def __init__(self) -> None:
        self._ms = self._tokens = 0.0

    def observe(self, ms: float, tokens: int) -> None:
        """A step took so long and sampled `tokens`."""
        if tokens:
            self._ms = self._ms * FORGET + ms
            self._tokens = self._tokens * FORGET + tokens

    def tokens_in(self, ms: float) -> float:
        """Tokens that come in so much time; without end where no time was measured."""
        return ms * self._tokens / self._ms if self._ms > 0 else float("inf")
