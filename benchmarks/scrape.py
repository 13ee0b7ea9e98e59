"""Counters and histograms of a server's /metrics, and what happened between two looks at them."""

from __future__ import annotations

import asyncio
import math

import httpx
from prometheus_client.parser import text_string_to_metric_families

PICTURE_AGE_S = 1.2
"""A tokenizer's picture of the system is at most a second old."""


class Times:
    """A histogram: cumulative counts by upper bound in seconds, the last one without bound."""

    def __init__(self, counts: dict[float, float], total: float) -> None:
        self._counts = counts
        self._total = total

    def since(self, earlier: Times) -> Times:
        counts = {bound: count - earlier._counts.get(bound, 0.0) for bound, count in self._counts.items()}
        return Times(counts, self._total - earlier._total)

    @property
    def count(self) -> float:
        return self._counts.get(math.inf, 0.0)

    @property
    def mean(self) -> float:
        return self._total / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The bound below which this share of all observations lies."""
        return next((bound for bound, count in sorted(self._counts.items()) if count >= share * self.count), math.inf)

    def above(self, seconds: float) -> float:
        """How many were longer; `seconds` is one of the bounds."""
        return self.count - self._counts.get(seconds, 0.0)


class Scrape:
    """Series of one name are added up, whatever their labels."""

    def __init__(self, text: str) -> None:
        self._values: dict[str, float] = {}
        self._buckets: dict[str, dict[float, float]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    buckets = self._buckets.setdefault(family.name, {})
                    bound = float(sample.labels["le"])
                    buckets[bound] = buckets.get(bound, 0.0) + sample.value
                else:
                    self._values[sample.name] = self._values.get(sample.name, 0.0) + sample.value

    def value(self, name: str) -> float:
        return self._values.get(name, 0.0)

    def histogram(self, name: str) -> Times:
        return Times(self._buckets.get(name, {}), self.value(f"{name}_sum"))


async def scrape(http: httpx.AsyncClient) -> Scrape:
    """The metrics, all of what has happened so far among them."""
    await asyncio.sleep(PICTURE_AGE_S)
    return Scrape((await http.get("/metrics")).text)
