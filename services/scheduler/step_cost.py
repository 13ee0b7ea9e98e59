"""What a worker's steps cost by their rows, learnt from its results: a fixed part and a part for each row.

Leaves what to do with it to drafting. Least squares over the steps so far, older ones counting less and less.
"""

from __future__ import annotations

FORGET = 0.98
"""Weight of a step after the next one: about the last 50 count."""
FIRST_SHARE = 1 / 30
"""What one row more costs of a step of one, until steps of several sizes were seen."""
LEAST_SPREAD = 4.0
"""Variance of the numbers of rows below which nothing can be said of a row's cost."""


class StepCost:
    """Times in ms; rows are tokens of a step."""

    __slots__ = ("_n", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def observe(self, rows: int, ms: float) -> None:
        """A step of `rows` tokens took so long."""
        self._n = self._n * FORGET + 1
        self._x = self._x * FORGET + rows
        self._y = self._y * FORGET + ms
        self._xx = self._xx * FORGET + rows * rows
        self._xy = self._xy * FORGET + rows * ms

    @property
    def known(self) -> bool:
        return self._y > 0

    def parts(self) -> tuple[float, float]:
        """ms that every step takes, and ms for each row."""
        mean, time = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean * mean
        if spread < LEAST_SPREAD:
            each = time * FIRST_SHARE / (1 + mean * FIRST_SHARE)
        else:
            each = min(max((self._xy / self._n - mean * time) / spread, 0.0), time / mean)
        return time - mean * each, each
