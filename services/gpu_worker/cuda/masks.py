"""Bitmasks by pinned memory and a side stream: the copy goes on beside the forward. Leaves waiting to the engine."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.cuda.device import GraphDevice
from services.gpu_worker.logit_edits import are_all_rows

Ints = NDArray[np.int64]
Words = NDArray[np.uint32]

FIRST_BYTES = 1 << 16


class MaskUpload:
    """One step's masks at a time: whoever applies them has waited for the sampling of the step before."""

    def __init__(self, device: GraphDevice) -> None:
        self._device = device
        self._copied = device.event()
        self._bits = torch.arange(32, dtype=torch.int32, device=device.device)
        self._grow(FIRST_BYTES)

    def apply(self, logits: torch.Tensor, rows: Ints, words: Words) -> None:
        """As `logit_edits.apply_masks`."""
        forbidden = self._expand(self._send(rows, words), words.shape, logits.shape[1])
        if are_all_rows(rows, logits):
            logits.masked_fill_(forbidden, float("-inf"))
            return
        where = self._there[: rows.nbytes].view(torch.int64)
        logits[where] = logits[where].masked_fill_(forbidden, float("-inf"))

    def _send(self, rows: Ints, words: Words) -> torch.Tensor:
        size = rows.nbytes + words.nbytes
        if size > len(self._pinned):
            self._grow(2 * size)
        host = self._pinned.numpy()
        host[: rows.nbytes] = rows.view(np.uint8)
        host[rows.nbytes : size] = np.ascontiguousarray(words, dtype="<u4").reshape(-1).view(np.uint8)
        with self._device.side_stream():
            self._there[:size].copy_(self._pinned[:size], non_blocking=True)
            self._copied.record()
        self._copied.hold_stream()
        return self._there[rows.nbytes : size].view(torch.int32)

    def _grow(self, size: int) -> None:
        self._pinned = self._device.pinned(size)
        with self._device.side_stream():
            # Memory of the compute stream may still be in use there by what was freed on the host long ago.
            self._there = torch.empty(size, dtype=torch.uint8, device=self._device.device)

    def _expand(self, words: torch.Tensor, shape: tuple[int, ...], vocab: int) -> torch.Tensor:
        bits = (words.view(shape).unsqueeze(2) >> self._bits) & 1
        return bits.view(shape[0], -1)[:, :vocab] == 0
