"""How fast workers compute and how fast pages move, as measured. Leaves what follows from it to placement."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.inflight import InflightStep
from services.scheduler.worker import Worker

SMOOTHING = 0.2
"""Weight of the newest measurement."""
MIN_STEP_TOKENS = 16
"""A step with fewer prompt tokens says more about decoding."""
ALIKE = 1.5
"""Workers whose rates differ less are taken for equal: each measures a little different all the time."""
FIRST_BYTES_PER_S = 1e9
FIRST_DELAY_S = 0.005
"""Of a transfer, until the first ones are measured. Hopeful: what looks too slow is never tried, so never measured."""
FIRST_TIER_BYTES_PER_S = {"host": 1e9, "disk": 200e6}
BULK_BYTES = 1 << 20
"""A transfer of fewer bytes says more about the delay."""


def smooth(before: float, measured: float) -> float:
    """Exponentially weighted moving average."""
    return measured if before <= 0 else before + SMOOTHING * (measured - before)


class Rates:
    """Prefill in tokens/s per worker, transfers in bytes/s and seconds of delay for the fleet."""

    def __init__(self) -> None:
        self.bytes_per_s = FIRST_BYTES_PER_S
        self._guessed = True
        self.delay_s = FIRST_DELAY_S
        self.tier_bytes_per_s = dict(FIRST_TIER_BYTES_PER_S)

    def computed(self, worker: Worker, step: InflightStep, forward_ms: float) -> None:
        """A step's result is in."""
        prompt_tokens = sum(chunk.end - chunk.start for chunk in step.chunks if not chunk.drafts)
        if prompt_tokens >= MIN_STEP_TOKENS and forward_ms > 0:
            rate = (prompt_tokens + len(step.decode)) / (forward_ms / 1e3)
            worker.prefill_rate = smooth(worker.prefill_rate, rate)

    def moved(self, num_bytes: int, seconds: float, tier: str = "") -> None:
        """A transfer, or bringing pages back from a tier, has succeeded."""
        if seconds <= 0:
            return
        if tier:
            self.tier_bytes_per_s[tier] = smooth(self.tier_bytes_per_s[tier], num_bytes / seconds)
            return
        if num_bytes < BULK_BYTES:
            self.delay_s = smooth(self.delay_s, seconds)
        else:
            rate = num_bytes / max(seconds - self.delay_s, seconds / 2)
            self.bytes_per_s = rate if self._guessed else smooth(self.bytes_per_s, rate)
            self._guessed = False

    def move_seconds(self, num_bytes: int, tier: str = "") -> float:
        if tier:
            return num_bytes / self.tier_bytes_per_s[tier]
        return self.delay_s + num_bytes / self.bytes_per_s

    @staticmethod
    def prefill_rates(workers: Iterable[Worker]) -> dict[Worker, float]:
        """Tokens/s of each; the mean of the others for who was not measured yet, 0 where nobody was."""
        everybody = list(workers)
        measured = [worker.prefill_rate for worker in everybody if worker.prefill_rate > 0]
        mean = sum(measured) / len(measured) if measured else 0.0
        return {
            worker: worker.prefill_rate if not mean / ALIKE <= (worker.prefill_rate or mean) <= mean * ALIKE else mean
            for worker in everybody
        }
