"""The tier in the host's memory: one slot per page. Leaves threads and orders to the service."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from services.gpu_worker.transfer.page_io import Bytes


class HostTier:
    """Memory is taken when a slot is first written."""

    def __init__(self, num_slots: int, num_layers: int, layer_bytes: int) -> None:
        self.num_slots = num_slots
        memory = mmap.mmap(-1, max(1, num_slots * num_layers * layer_bytes))
        self._slots = np.frombuffer(memory, np.uint8)[: num_slots * num_layers * layer_bytes]
        self._slots = self._slots.reshape(num_slots, num_layers, layer_bytes)

    def put(self, slots: list[int], data: Bytes) -> None:
        """uint8 [layers, n, bytes], as PageIO reads. Raises IndexError."""
        self._slots[self._index(slots)] = data.transpose(1, 0, 2)

    def get(self, slots: list[int]) -> Bytes:
        """uint8 [layers, n, bytes]. Raises IndexError."""
        return np.ascontiguousarray(self._slots[self._index(slots)].transpose(1, 0, 2))

    def _index(self, slots: list[int]) -> NDArray[np.int64]:
        index = np.array(slots, np.int64)
        if len(index) and not (index.min() >= 0 and index.max() < self.num_slots):
            raise IndexError("a slot is not in the host tier")
        return index
