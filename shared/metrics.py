"""The bucket table of histograms in heartbeats and a counter for it; leaves names and exposition to the tokenizer."""

from __future__ import annotations

from bisect import bisect_left

BUCKETS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0),
    *(10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 80.0, 100.0, 200.0, 400.0, 800.0, 1600.0, 2400.0),
)
"""Upper bounds in seconds, each inclusive, as Prometheus reads them; one more bucket holds everything above."""

FINE_BUCKETS = (
    *(0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 5.0),
)
"""The same for what usually takes less than a millisecond."""


class Histogram:
    """Counts of observations by bounds, and their sum. `snapshot()` is what a Heartbeat carries."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...] = BUCKETS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += times
        self._sum += seconds * times

    def snapshot(self) -> tuple[float, ...]:
        """Cumulative counts per bound, their total, then the sum."""
        values: list[float] = []
        total = 0
        for count in self._counts:
            total += count
            values.append(float(total))
        return (*values, self._sum)
