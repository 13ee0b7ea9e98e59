"""Counter-based uniforms keyed by (seed, position); leaves what is drawn with them to the sampler.

Philox4x32-10 from Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011). There is no
state: a request gets the same numbers alone, in any batch, on any worker and after a resume.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt64s = NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10


def philox(counter: tuple[UInt64s, ...], key: tuple[UInt64s, UInt64s]) -> tuple[UInt64s, ...]:
    """Four 32-bit words per element, each in a uint64; `counter` has four words, `key` two, all broadcastable."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first = _MULTIPLIERS[0] * c0  # 32 x 32 bits never overflows 64
        second = _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (second >> _HALF) ^ c1 ^ k0,
            second & _LOW,
            (first >> _HALF) ^ c3 ^ k1,
            first & _LOW,
        )
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: UInt64s, positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, absolute position), both [n]."""
    where = positions.astype(np.uint64)
    zero = np.zeros_like(where)
    counter = (where & _LOW, where >> _HALF, zero, zero)
    high, low, _, _ = philox(counter, (seeds & _LOW, seeds >> _HALF))
    return ((high << np.uint64(21)) | (low >> np.uint64(11))).astype(np.float64) * 2.0**-53
