"""Edits of all slots as columns of numbers and addresses, for the kernel that applies them. Leaves what they mean to
`logit_edits`, whose objects own the memory."""

from __future__ import annotations

import numpy as np

from services.gpu_worker.logit_edits import SlotEdits


class EditColumns:
    """One entry per slot, written when the slot opens; `follow` after its history has grown."""

    def __init__(self, max_slots: int) -> None:
        def column(kind: type) -> np.ndarray:
            return np.zeros(max_slots, dtype=kind)

        self.seen, self.counts, self.num_seen = column(np.uint64), column(np.uint64), column(np.int64)
        self.repetition, self.frequency, self.presence = (column(np.float32) for _ in range(3))
        self.biased, self.biases, self.num_biased = column(np.uint64), column(np.uint64), column(np.int64)
        self.stops, self.num_stops, self.stops_from = column(np.uint64), column(np.int64), column(np.int64)
        pointers = (self.seen, self.biased, self.stops, self.counts, self.biases)
        numbers = (self.num_seen, self.num_biased, self.num_stops, self.stops_from)
        held = (*pointers, *numbers, self.repetition, self.frequency, self.presence)
        self.addresses = tuple(one.ctypes.data for one in held)
        """In the order of the kernel's call."""

    def __len__(self) -> int:
        return len(self.seen)

    def set(self, slot: int, edits: SlotEdits | None) -> None:
        """Take over one request's edits; the caller holds them as long as the slot is open."""
        self.num_seen[slot] = self.num_biased[slot] = self.num_stops[slot] = 0
        if edits is None:
            return
        self.repetition[slot], self.frequency[slot] = edits.repetition, edits.frequency
        self.presence[slot] = edits.presence
        self.biased[slot], self.biases[slot] = edits.bias_ids.ctypes.data, edits.bias_values.ctypes.data
        self.num_biased[slot] = len(edits.bias_ids)
        self.stops[slot], self.num_stops[slot] = edits.stop_ids.ctypes.data, len(edits.stop_ids)
        self.stops_from[slot] = edits.prompt_length + edits.min_new_tokens
        self.follow(slot, edits)

    def follow(self, slot: int, edits: SlotEdits) -> None:
        """The slot's history has grown."""
        if edits.history is not None:
            self.seen[slot], self.counts[slot] = edits.history.addresses
            self.num_seen[slot] = len(edits.history)
