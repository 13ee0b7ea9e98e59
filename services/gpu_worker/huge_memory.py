"""Memory in large pages, where the system has them, for what every step reads. Leaves its contents to the callers.

A page of 4 KiB is left after a microsecond of reading, and finding the next one costs most where the machine is a
virtual one: steps of a small model took a tenth longer. Systems without large pages only lose that.
"""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch

HUGE_PAGE = 2 << 20
REGION = 64 << 20


def zeros(size: int, touched: int = 0) -> torch.Tensor:
    """uint8 [size] at a multiple of HUGE_PAGE. The system provides it where first touched, here the first bytes."""
    memory = mmap.mmap(-1, max(1, size) + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % HUGE_PAGE
    whole[start : start + min(size, touched)].zero_()
    return whole[start : start + size]


class Arena:
    """Many pieces side by side in few regions; a region is given back when none of its pieces is used any more."""

    ALIGNMENT = 4096  # where a tile of weights never straddles lines or small pages

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = zeros(0)

    def take(self, size: int) -> torch.Tensor:
        """uint8 [size] of zeros."""
        step = -(-size // self.ALIGNMENT) * self.ALIGNMENT
        with self._lock:
            if step > len(self._left):
                self._left = zeros(max(step, REGION))
            piece, self._left = self._left[:size], self._left[step:]
        return piece
