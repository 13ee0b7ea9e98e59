"""Mask and weight kernels against plain arithmetic, on every instruction set that runs here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.gpu_worker.kernels import library, logits
from services.gpu_worker.kernels.logits import BLOCK
from services.gpu_worker.selection import BLOCK as SELECTION_BLOCK

LIBRARY = library.load()


@pytest.fixture(params=library.available_isas(LIBRARY.functions))
def kernels(request: pytest.FixtureRequest) -> library.Library:
    return library.Library(LIBRARY.functions, request.param)


def test_the_sampler_has_the_same_blocks() -> None:
    assert BLOCK == SELECTION_BLOCK


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100, 1024])
@pytest.mark.parametrize("rows", [[0], [2, 0], [0, 1, 2, 3, 4]], ids=len)
def test_masks(kernels: library.Library, vocab: int, rows: list[int]) -> None:
    rng = np.random.default_rng(vocab)
    words = rng.integers(0, 2**32, (len(rows), -(-vocab // 32)), dtype=np.uint32)
    words[0, 0], words[-1, -1] = 0xFFFFFFFF, 0
    wide = torch.randn(5, vocab + 3)
    x, before = wide[:, :vocab], wide.clone()
    logits.mask_rows(kernels, x, np.array(rows), words)
    for row, mask in zip(rows, words, strict=True):
        for token in range(vocab):
            allowed = int(mask[token // 32]) >> token % 32 & 1
            assert x[row, token] == (before[row, token] if allowed else float("-inf")), (row, token)
    others = [row for row in range(5) if row not in rows]
    assert torch.equal(wide[others], before[others])
    assert torch.equal(wide[:, vocab:], before[:, vocab:])


@pytest.mark.parametrize("vocab", [1, 15, 32, 65, 500, 2048, 5000])
def test_peaks(kernels: library.Library, vocab: int) -> None:
    x = torch.randn(5, vocab + 2)[:, :vocab]
    x[1] = float("-inf")
    x[2, vocab // 2] = float("nan")
    x[3, vocab // 3] = float("inf")
    peaks, places = logits.peaks_of(kernels, x)
    assert torch.equal(peaks.nan_to_num(9e9), x.amax(1).nan_to_num(9e9))
    whole = [0, 1, 3, 4]
    assert places[whole].tolist() == x[whole].argmax(1).tolist()
    assert 0 <= places[2] < vocab


@given(st.data())
def test_of_equal_peaks_the_first(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([3, 40, 2050, 4500]))
    x = torch.zeros(1, vocab)
    equals = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=4))
    x[0, equals] = 1.0
    peaks, places = logits.peaks_of(library.load(), x)
    assert peaks.tolist() == [1.0]
    assert places.tolist() == [min(equals)]


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("temperature", [1e-6, 0.3, 1.0, 7.0])
def test_weights(kernels: library.Library, vocab: int, temperature: float) -> None:
    x = torch.randn(4, vocab) * 5
    x[1, ::3] = float("-inf")
    x[1, vocab // 2] = 1.5
    peaks, rows = x.amax(1), np.array([3, 1])
    blocks = -(-vocab // BLOCK)
    weights, sums = torch.full((2, blocks * BLOCK), 7.0), torch.full((2, blocks), 7.0)
    temperatures = np.array([temperature, 1.0], np.float32)
    logits.weigh_rows(kernels, x, peaks, rows, temperatures, weights, sums)
    wanted = ((x - peaks[:, None])[rows].double() / torch.from_numpy(temperatures)[:, None].double()).exp()
    assert torch.allclose(weights[:, :vocab].double(), wanted, rtol=2e-5, atol=1e-37)
    assert (weights[:, :vocab].amax(1) - 1).abs().max() < 1e-6
    assert (weights[:, vocab:] == 0).all()
    assert (weights[:, :vocab][x[rows] == float("-inf")] == 0).all()
    assert torch.allclose(sums.double(), weights.double().view(2, blocks, BLOCK).sum(2), rtol=1e-6)


def test_a_row_is_the_same_alone(kernels: library.Library) -> None:
    x = torch.randn(7, 333)
    peaks = x.amax(1)

    def weigh(rows: list[int]) -> torch.Tensor:
        weights, sums = torch.empty(len(rows), 6 * BLOCK), torch.empty(len(rows), 6)
        logits.weigh_rows(kernels, x, peaks, np.array(rows), np.full(len(rows), 0.7, np.float32), weights, sums)
        return torch.cat([weights, sums], 1)

    assert torch.equal(weigh([0, 1, 2, 3, 4, 5, 6])[5], weigh([5])[0])


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(2, 40)
    with pytest.raises(ValueError, match="not in the logits"):
        logits.mask_rows(LIBRARY, x, np.array([2]), np.zeros((1, 2), np.uint32))
    with pytest.raises(ValueError, match="do not fit"):
        logits.mask_rows(LIBRARY, x, np.array([1]), np.zeros((1, 1), np.uint32))
    with pytest.raises(ValueError, match="no kernel"):
        logits.mask_rows(LIBRARY, x.double(), np.array([1]), np.zeros((1, 2), np.uint32))
