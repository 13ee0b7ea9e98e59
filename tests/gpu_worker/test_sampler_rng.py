"""Philox against the published vectors, and what uniforms promise."""

from __future__ import annotations

import numpy as np
import pytest

from services.gpu_worker.rng import philox, uniforms

# kat_vectors of Random123, philox4x32 with 10 rounds: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[np.ndarray, ...]:
    return tuple(np.array([int(word, 16)], dtype=np.uint64) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    first, second = words(key)
    assert philox(words(counter), (first, second)) == words(expected)


def test_uniforms_depend_on_seed_and_position_only() -> None:
    seeds = np.array([0, 1, 2**63 - 1, 2**32], dtype=np.uint64)
    positions = np.array([0, 5, 5, 2**33], dtype=np.int64)
    together = uniforms(seeds, positions)
    assert together.tolist() == [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(4)]
    assert len(set(together.tolist())) == 4


def test_uniforms_are_uniform_along_positions_and_along_seeds() -> None:
    n = 20_000
    for seeds, positions in (
        (np.full(n, 42, dtype=np.uint64), np.arange(n)),
        (np.arange(n, dtype=np.uint64), np.full(n, 7)),
    ):
        drawn = uniforms(seeds, positions)
        assert drawn.min() >= 0.0
        assert drawn.max() < 1.0
        counts = np.histogram(drawn, bins=100, range=(0, 1))[0]
        chi2 = ((counts - n / 100) ** 2 / (n / 100)).sum()
        assert abs(chi2 - 99) < 4 * np.sqrt(2 * 99)
        assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03
