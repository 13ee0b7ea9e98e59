"""Sampling parameters as columns over slots, gathered a batch at a time; leaves use to the sampler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.gpu_worker.selection import Filters
from shared.messages.request import SamplingParams

LOG2E = 1.4426950408889634
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class SamplingColumns:
    """One entry per slot, written when the slot opens."""

    def __init__(self, max_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.greedy = np.zeros(max_slots, dtype=np.bool_)
        self.filtered = np.zeros(max_slots, dtype=np.bool_)
        self.temperature = np.ones(max_slots, dtype=np.float64)
        self.top_k = np.zeros(max_slots, dtype=np.int64)
        self.top_p = np.ones(max_slots, dtype=np.float64)
        self.min_p = np.zeros(max_slots, dtype=np.float64)
        self.seed = np.zeros(max_slots, dtype=np.uint64)
        held = (self.greedy, self.temperature, self.top_p, self.min_p, self.top_k, self.seed)
        self.scale = np.zeros(max_slots, dtype=np.float32)
        """Of the sums that the kernels' product notes: for draws from all tokens or a share of them, and for scores."""
        self.addresses = tuple(column.ctypes.data for column in held)
        """For the kernel, which finds a row's entries by its slot."""

    def set(self, slot: int, params: SamplingParams) -> None:
        """Take over one request's parameters."""
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else 0
        # Best of one is the best, whatever rounding makes of two nearly equal weights.
        self.greedy[slot] = params.temperature <= 0.0 or top_k == 1
        self.filtered[slot] = top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self.temperature[slot] = max(params.temperature, 1e-6)
        self.top_k[slot] = top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = min(params.min_p, 1.0)
        self.seed[slot] = params.seed & (2**64 - 1)
        drawn_by_sums = not self.greedy[slot] and top_k == 0 and (params.top_p < 1.0 or params.min_p <= 0.0)
        if drawn_by_sums:
            self.scale[slot] = np.float32(LOG2E) / np.float32(self.temperature[slot])
        else:
            self.scale[slot] = LOG2E if params.logprobs >= 0 else 0.0

    def rows(self, slots: Ints, positions: Ints) -> SampleRows:
        """The columns of `slots` [n], drawing the tokens at `positions` [n]."""
        return SampleRows(self, slots, positions)


@dataclass(frozen=True, slots=True)
class SampleRows:
    """What the sampler needs of n rows: their slots' columns, gathered where they are asked for, [n] each."""

    columns: SamplingColumns
    slots: Ints
    positions: Ints  # absolute positions of the tokens that are drawn

    @property
    def greedy(self) -> Flags:
        return self.columns.greedy[self.slots]

    @property
    def filtered(self) -> Flags:
        return self.columns.filtered[self.slots]

    @property
    def temperature(self) -> Floats:
        return self.columns.temperature[self.slots]

    @property
    def filters(self) -> Filters:
        columns = self.columns
        return Filters(columns.top_k, columns.top_p, columns.min_p).take(self.slots)

    @property
    def seeds(self) -> NDArray[np.uint64]:
        return self.columns.seed[self.slots]
