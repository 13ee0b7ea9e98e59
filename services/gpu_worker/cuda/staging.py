"""Many small arrays of one step in one copy to the device. Leaves what they mean to the caller."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.cuda.device import GraphDevice

ALIGNMENT = 16
FIRST_BYTES = 1 << 16

_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}


class Staging:
    """A pinned buffer that grows; it is written again only once the device has taken what it held."""

    def __init__(self, device: GraphDevice) -> None:
        self._device = device
        self._buffer = device.pinned(FIRST_BYTES)
        self._taken = device.event()

    def send(self, arrays: Mapping[str, NDArray]) -> dict[str, torch.Tensor]:
        """The arrays as tensors of the device, in the order of its stream: int32, int64, float32 or float64 [n]."""
        places, size = {}, 0
        for name, array in arrays.items():
            places[name] = size
            size += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        self._taken.wait()
        if size > len(self._buffer):
            self._buffer = self._device.pinned(max(size, 2 * len(self._buffer)))
        host = self._buffer.numpy()
        for name, array in arrays.items():
            start = places[name]
            host[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
        there = torch.empty(size, dtype=torch.uint8, device=self._device.device)
        there.copy_(self._buffer[:size], non_blocking=True)
        self._taken.record()
        return {
            name: there[places[name] : places[name] + array.nbytes].view(_DTYPES[array.dtype])
            for name, array in arrays.items()
        }
