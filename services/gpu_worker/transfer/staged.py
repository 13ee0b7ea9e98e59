"""Pages side by side in one piece of memory, as another worker may read them. Leaves whose memory it is to `carrier`.

The bytes lie as PageIO.read gives them: [layer][page][page's bytes in that layer].
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

_ALL = (1 << 64) - 1


def checksum(staged: NDArray[np.uint8]) -> int:
    """The sum of the words, each times its own odd number, modulo 2^64: words of 8 bytes where they divide, else of 1.

    Every processor can add up like that at the speed of its memory. It finds a word that differs, words that have
    changed places, and what was there before.
    """
    words = staged.view(np.uint64) if staged.size % 8 == 0 else staged.astype(np.uint64)
    return int((words * np.arange(1, 2 * words.size, 2, dtype=np.uint64)).sum(dtype=np.uint64))


def device_checksum(staged: torch.Tensor) -> torch.Tensor:
    """The same of uint8 [n] on its device, as int64 [1] that `as_unsigned` makes equal."""
    words = staged.view(torch.int64) if staged.numel() % 8 == 0 else staged.long()
    numbers = torch.arange(1, 2 * words.numel(), 2, dtype=torch.int64, device=staged.device)
    return (words * numbers).sum().view(1)


def as_unsigned(total: int) -> int:
    return total & _ALL
