"""Mask and weight kernels against plain arithmetic, on every instruction set that runs here."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.gpu_worker.edit_columns import EditColumns
from services.gpu_worker.kernels import library, logits
from services.gpu_worker.logit_edits import RowEdit, SlotEdits, apply_edits
from services.gpu_worker.sampling_columns import LOG2E, SamplingColumns
from shared import ints
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
    logits.mask_rows(x, logits.Blocks.of(kernels, x), np.array(rows), words)
    for row, mask in zip(rows, words, strict=True):
        for token in range(vocab):
            allowed = int(mask[token // 32]) >> token % 32 & 1
            assert x[row, token] == (before[row, token] if allowed else float("-inf")), (row, token)
    others = [row for row in range(5) if row not in rows]
    assert torch.equal(wide[others], before[others])
    assert torch.equal(wide[:, vocab:], before[:, vocab:])


def spoilt(rows: int, vocab: int) -> torch.Tensor:
    x = torch.randn(rows, vocab + 3)[:, :vocab] * 4
    x[0, vocab // 2] = float("nan")
    x[1, vocab // 3] = float("inf")
    x[2] = float("-inf")
    return x


def holds(blocks: logits.Blocks, x: torch.Tensor) -> None:
    """Block by block what plain arithmetic says."""
    parts = x.split(logits.BLOCK, dim=1)
    peaks = torch.stack([part.amax(1) for part in parts], dim=1)  # amax: NaN where any is
    assert torch.equal(blocks.peaks.nan_to_num(99), peaks.nan_to_num(99))
    for row, scale in enumerate(blocks.scales.tolist()):
        for block, part in enumerate(parts):
            peak = peaks[row, block].double()
            if scale > 0 and peak.isfinite():
                expected = torch.exp2((part[row].double() - peak) * scale).sum()
                assert blocks.sums[row, block].item() == pytest.approx(expected.item(), rel=1e-5)
            elif scale > 0 and peak == float("-inf"):
                assert blocks.sums[row, block] == 0


SCALES = torch.tensor([0.0, 1.5, 0.7, LOG2E, 1e5])


@pytest.mark.parametrize("vocab", [1, 2, 7, 31, 32, 33, 40, 64, 100, 1024])
def test_blocks(kernels: library.Library, vocab: int) -> None:
    x = spoilt(5, vocab)
    holds(logits.Blocks.of(kernels, x, SCALES), x)


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 100, 1024])
def test_masks_keep_blocks_true(kernels: library.Library, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    x = spoilt(5, vocab)
    words = rng.integers(0, 2**32, (3, logits.blocks_of(vocab)), dtype=np.uint32)
    words[0, 0], words[-1, -1] = 0xFFFFFFFF, 0
    blocks = logits.Blocks.of(kernels, x, SCALES)
    logits.mask_rows(x, blocks, np.array([3, 0, 4]), words)
    holds(blocks, x)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.98])
@pytest.mark.parametrize("vocab", [1, 31, 33, 100, 5000])
def test_masks_of_rows_that_want_the_likeliest(kernels: library.Library, vocab: int, share: float) -> None:
    """The same token and largest logit as with everything forbidden, also among equals and with broken logits."""
    rng = np.random.default_rng(vocab)
    n = 12
    x = torch.cat([spoilt(3, vocab), (torch.randn(n - 3, vocab) * 3).round()])
    allowed = rng.random((n, logits.blocks_of(vocab), 32)) < share
    allowed[5:7] = allowed[5:7, :, :1]  # whole words
    words = np.packbits(allowed, axis=2, bitorder="little").view(np.uint32)[..., 0]
    rows = rng.permutation(n)
    whole, sparing = x.clone(), x.clone()
    logits.mask_rows(whole, logits.Blocks.of(kernels, whole), rows, words)
    known = logits.Blocks.of(kernels, sparing)
    logits.mask_rows(sparing, known, rows, words, np.arange(n) % 4 != 1)
    for place in np.flatnonzero(np.arange(n) % 4 == 1):
        assert torch.equal(sparing[rows[place]].nan_to_num(99), whole[rows[place]].nan_to_num(99))
    expected, found = greedy(kernels, whole), greedy(kernels, sparing, known)
    assert np.array_equal(found[1], expected[1], equal_nan=True)
    fit = np.isfinite(expected[1])
    assert np.array_equal(np.array(found[0])[fit], np.array(expected[0])[fit])
    if share == 0:
        assert not fit.any()
    if share and vocab == 5000:
        assert fit.sum() >= n - 5  # all but the broken rows and those of whole words


def test_edits(kernels: library.Library) -> None:
    """As torch's: penalties, then biases, then stop tokens; what is known of the blocks stays true."""
    vocab = 200
    rng = np.random.default_rng(1)
    x = torch.randn(5, vocab) * 3
    wishes = [
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, presence_penalty=-0.5),
        SamplingParams(min_new_tokens=3, stop_token_ids=(7, 8, 199)),
        SamplingParams(logit_bias_ids=ints.pack([5, 9, 5]), logit_bias_values=np.float32([1, -2, 3]).tobytes()),
        SamplingParams(frequency_penalty=1.0, min_new_tokens=9, stop_token_ids=(5,), logit_bias_ids=ints.pack([5]),
                       logit_bias_values=np.float32([4]).tobytes()),
    ]  # fmt: skip
    columns, edits = EditColumns(6), [SlotEdits.of(wish, 10, vocab) for wish in wishes]
    for slot, one in enumerate(edits):
        assert one is not None
        if one.history is not None:
            one.history.extend(0, rng.integers(0, vocab, 90 + slot).tolist())
        columns.set(slot, one)
    slots, positions = np.array([2, 0, 5, 3, 1]), np.array([100, 100, 100, 12, 14])
    blocks, expected = logits.Blocks.of(kernels, x, SCALES), x.clone()
    plans = [(row, edits[slot]) for row, slot in enumerate(slots.tolist()) if slot != 5]
    apply_edits(expected, [RowEdit(row, int(positions[row]), one, row != 3) for row, one in plans if one is not None])
    logits.edit_rows(x, blocks, columns, slots, positions, np.arange(5) == 3)
    assert torch.allclose(x, expected, rtol=1e-6, atol=1e-6)  # of differences that may be close to 0
    assert torch.equal(x[2], expected[2])
    holds(blocks, x)
    with pytest.raises(ValueError, match="no such slot"):
        logits.edit_rows(x, blocks, columns, np.array([0, 0, 0, 0, 6]), positions, None)
    with pytest.raises(ValueError, match="for each row"):
        logits.edit_rows(x, blocks, columns, slots[:4], positions[:4], None)


def test_edits_follow_a_history(kernels: library.Library) -> None:
    """Also where it grows beyond its first memory."""
    edits = SlotEdits.of(SamplingParams(presence_penalty=1.0), 0, 500)
    assert edits is not None
    assert edits.history is not None
    columns = EditColumns(1)
    columns.set(0, edits)
    for token in range(300):
        edits.history.extend(token, [token])
        columns.follow(0, edits)
    x = torch.zeros(1, 500)
    logits.edit_rows(x, logits.Blocks.of(kernels, x), columns, np.zeros(1, np.int64), np.array([300]), None)
    assert x[0].tolist() == [-1.0] * 300 + [0.0] * 200
    columns.set(0, None)
    logits.edit_rows(x, logits.Blocks.of(kernels, x), columns, np.zeros(1, np.int64), np.array([300]), None)
    assert x[0].tolist() == [-1.0] * 300 + [0.0] * 200


def drawing(x: torch.Tensor, blocks: logits.Blocks, columns: SamplingColumns) -> logits.Draws:
    room = logits.draw_scratch(blocks.kernels, x.shape[1], logits.threads_for(len(x)))
    return logits.Draws(x, blocks, columns, torch.zeros(room))


def greedy(
    kernels: library.Library, x: torch.Tensor, blocks: logits.Blocks | None = None
) -> tuple[list[int], np.ndarray]:
    columns = SamplingColumns(1, x.shape[1])
    columns.set(0, SamplingParams(temperature=0.0))
    slots = np.zeros(len(x), np.int64)
    blocks = logits.Blocks.of(kernels, x) if blocks is None else blocks
    tokens, highest = drawing(x, blocks, columns).run(slots, slots)
    return tokens.tolist(), highest


@pytest.mark.parametrize("vocab", [1, 40, 1000])
def test_sums_that_are_known_choose_the_same_tokens(kernels: library.Library, vocab: int) -> None:
    """As those that the draw finds for itself, in every way of drawing; also where masks and edits came between."""
    ways = [{}, {"top_p": 0.9}, {"top_p": 0.5, "min_p": 0.01}, {"top_k": 5}, {"min_p": 0.1}, {"logprobs": 1}]
    columns, n = SamplingColumns(len(ways), vocab), 30 * len(ways)
    for slot, way in enumerate(ways):
        columns.set(slot, SamplingParams(temperature=0.7, seed=3, **way))
    x = torch.randn(n, vocab) * 2
    slots = np.arange(n) % len(ways)
    known = logits.Blocks.of(kernels, x, torch.from_numpy(columns.scale[slots]))
    words = np.full((n, logits.blocks_of(vocab)), 0xF0F0F0FF, dtype=np.uint32)
    logits.mask_rows(x, known, np.arange(n), words)
    draws = [drawing(x, blocks, columns) for blocks in (logits.Blocks.of(kernels, x), known)]
    expected, found = (draw.run(slots, np.arange(n))[0] for draw in draws)
    assert found.tolist() == expected.tolist()
    assert len(set(expected.tolist())) > vocab // 40


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
    scales = torch.tensor([0.0, LOG2E, LOG2E, 1.0])  # of the sums that are there, and of others
    targets = np.array([0, vocab // 2, vocab - 1, vocab // 3])
    scores = logits.score_rows(x, logits.Blocks.of(kernels, x, scales), targets, top)
    assert np.array_equal(scores.chosen, x.numpy()[np.arange(4), targets] - scores.norms)
    assert np.allclose(scores.norms, torch.logsumexp(x.double(), 1).numpy(), rtol=1e-6, atol=1e-6)
    for row in range(4):
        order = np.lexsort((np.arange(vocab), -x[row].numpy()))[:top]
        assert scores.top_ids[row].tolist() == order.tolist()
        assert scores.top_logprobs[row].tolist() == (x[row].numpy()[order] - scores.norms[row]).tolist()


def test_scores_of_a_broken_row_are_broken(kernels: library.Library) -> None:
    x = torch.zeros(2, 70)
    x[0, 69] = float("nan")
    scores = logits.score_rows(x, logits.Blocks.of(kernels, x), np.array([1, 1]), 3)
    assert np.isnan(scores.norms[0])
    assert np.isnan(scores.chosen[0])
    assert scores.norms[1] == pytest.approx(np.log(70))
    assert ((scores.top_ids >= 0) & (scores.top_ids < 70)).all()


def test_a_row_is_the_same_alone(kernels: library.Library) -> None:
    x = torch.randn(7, 333)
    found = [logits.score_rows(part, logits.Blocks.of(kernels, part), np.full(len(part), 9), 4) for part in (x, x[5:6])]
    for together, alone in zip(*((s.norms, s.chosen, s.top_ids, s.top_logprobs) for s in found), strict=True):
        assert (together[5] == alone[0]).all()


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(2, 40)
    blocks = logits.Blocks.of(LIBRARY, x)
    with pytest.raises(ValueError, match="not in the logits"):
        logits.mask_rows(x, blocks, np.array([2]), np.zeros((1, 2), np.uint32))
    with pytest.raises(ValueError, match="do not fit"):
        logits.mask_rows(x, blocks, np.array([1]), np.zeros((1, 1), np.uint32))
    with pytest.raises(ValueError, match="no kernel"):
        logits.mask_rows(x.double(), blocks, np.array([1]), np.zeros((1, 2), np.uint32))
    with pytest.raises(ValueError, match="likeliest"):
        logits.score_rows(x, blocks, np.zeros(2, np.int64), 41)
    with pytest.raises(ValueError, match="target"):
        logits.score_rows(x, blocks, np.array([0, 40]), 3)
    with pytest.raises(ValueError, match="blocks"):
        logits.score_rows(x, blocks.first(1), np.zeros(2, np.int64), 3)


def test_draws_refuse_rows_without_parameters(kernels: library.Library) -> None:
    x, columns = torch.zeros(2, 40), SamplingColumns(3, 40)
    draws = drawing(x, logits.Blocks.of(kernels, x), columns)
    for slots in ([0, 3], [-1, 0]):
        with pytest.raises(ValueError, match="parameters"):
            draws.run(np.array(slots), np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="each row"):
        draws.run(np.zeros(1, np.int64), np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="room"):
        logits.Draws(x, logits.Blocks.of(kernels, x), columns, torch.zeros(9))
