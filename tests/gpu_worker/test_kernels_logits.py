"""Mask and weight kernels against plain arithmetic, on every instruction set that runs here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.gpu_worker.kernels import library, logits
from services.gpu_worker.sampling_columns import SamplingColumns
from shared.messages.request import SamplingParams

LIBRARY = library.load()


@pytest.fixture(params=library.available_isas(LIBRARY.functions))
def kernels(request: pytest.FixtureRequest) -> library.Library:
    return library.Library(LIBRARY.functions, request.param)


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


def greedy(kernels: library.Library, x: torch.Tensor) -> tuple[list[int], np.ndarray]:
    columns = SamplingColumns(1, x.shape[1])
    columns.set(0, SamplingParams(temperature=0.0))
    slots = np.zeros(len(x), np.int64)
    scratch = torch.zeros(logits.draw_scratch(kernels, x.shape[1], logits.threads_for(len(x))))
    tokens, peaks = logits.draw_rows(kernels, x, columns.rows(slots, slots), scratch)
    return tokens.tolist(), peaks


@pytest.mark.parametrize("vocab", [1, 15, 32, 65, 500, 2048, 5000])
def test_peaks(kernels: library.Library, vocab: int) -> None:
    x = torch.randn(5, vocab + 2)[:, :vocab]
    x[1] = float("-inf")
    x[2, vocab // 2] = float("nan")
    x[3, vocab // 3] = float("inf")
    tokens, peaks = greedy(kernels, x)
    assert np.array_equal(peaks, x.amax(1).numpy(), equal_nan=True)
    assert [tokens[row] for row in (0, 1, 3, 4)] == x[[0, 1, 3, 4]].argmax(1).tolist()


@given(st.data())
def test_of_equal_peaks_the_first(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([3, 40, 2050, 4500]))
    x = torch.zeros(1, vocab)
    equals = data.draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=4))
    x[0, equals] = 1.0
    tokens, peaks = greedy(LIBRARY, x)
    assert peaks.tolist() == [1.0]
    assert tokens == [min(equals)]


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("top", [0, 1, 5, 64])
def test_scores(kernels: library.Library, vocab: int, top: int) -> None:
    top = min(top, vocab)
    x = torch.randn(4, vocab + 3)[:, :vocab] * 5
    x[1] = x[1].round()  # equals
    x[2, ::3] = float("-inf")
    x[2, vocab // 2] = 1.5
    norms, tokens, values = logits.score_rows(kernels, x, top)
    assert np.allclose(norms, torch.logsumexp(x.double(), 1).numpy(), rtol=1e-6, atol=1e-6)
    for row in range(4):
        order = np.lexsort((np.arange(vocab), -x[row].numpy()))[:top]
        assert tokens[row].tolist() == order.tolist()
        assert values[row].tolist() == x[row][tokens[row]].tolist()


def test_scores_of_a_broken_row_are_broken(kernels: library.Library) -> None:
    x = torch.zeros(2, 70)
    x[0, 69] = float("nan")
    norms, tokens, _ = logits.score_rows(kernels, x, 3)
    assert np.isnan(norms[0])
    assert norms[1] == pytest.approx(np.log(70))
    assert ((tokens >= 0) & (tokens < 70)).all()


def test_a_row_is_the_same_alone(kernels: library.Library) -> None:
    x = torch.randn(7, 333)
    together, alone = logits.score_rows(kernels, x, 4), logits.score_rows(kernels, x[5:6], 4)
    assert all((a[5] == b[0]).all() for a, b in zip(together, alone, strict=True))


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(2, 40)
    with pytest.raises(ValueError, match="not in the logits"):
        logits.mask_rows(LIBRARY, x, np.array([2]), np.zeros((1, 2), np.uint32))
    with pytest.raises(ValueError, match="do not fit"):
        logits.mask_rows(LIBRARY, x, np.array([1]), np.zeros((1, 1), np.uint32))
    with pytest.raises(ValueError, match="no kernel"):
        logits.mask_rows(LIBRARY, x.double(), np.array([1]), np.zeros((1, 2), np.uint32))
    with pytest.raises(ValueError, match="likeliest"):
        logits.score_rows(LIBRARY, x, 41)
