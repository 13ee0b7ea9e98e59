"""Penalties, biases and masks against their definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.gpu_worker.history import History
from services.gpu_worker.logit_edits import RowEdit, SlotEdits, apply_edits, apply_masks
from services.gpu_worker.scoring import ScoreSpec, score
from shared.ints import pack
from shared.messages.request import SamplingParams

VOCAB = 70


def logits_of(rows: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(rows).standard_normal((rows, VOCAB)).astype(np.float32) * 3)


def edits_of(prompt: list[int], output: list[int], **fields: object) -> SlotEdits:
    edits = SlotEdits(SamplingParams(**fields), len(prompt), VOCAB)  # type: ignore[arg-type]
    if edits.history is not None:
        edits.history.extend(0, [*prompt, *output])
    return edits


def naive_penalties(
    row: np.ndarray, prompt: list[int], output: list[int], rep: float, freq: float, pres: float
) -> np.ndarray:
    row = row.astype(np.float64)
    for token in set(prompt) | set(output):
        row[token] = row[token] / rep if row[token] > 0 else row[token] * rep
    for token in set(output):
        row[token] -= freq * output.count(token) + pres
    return row


def test_penalties_are_those_of_the_definition_row_by_row() -> None:
    cases = [
        ([1, 2, 3, 3], [3, 4, 4, 9], 1.4, 0.3, 0.8),
        ([5], [], 1.0, 2.0, 0.0),
        ([7, 8], [8] * 150, 1.2, 0.01, -0.5),
    ]
    logits = logits_of(5)
    expected = logits.numpy().astype(np.float64)
    rows = []
    for i, (prompt, output, rep, freq, pres) in enumerate(cases):
        edits = edits_of(prompt, output, repetition_penalty=rep, frequency_penalty=freq, presence_penalty=pres)
        rows.append(RowEdit(i + 1, len(prompt) + len(output), edits))
        expected[i + 1] = naive_penalties(expected[i + 1], prompt, output, rep, freq, pres)
    apply_edits(logits, rows)
    assert logits.numpy() == pytest.approx(expected, abs=1e-4)


def test_history_counts_a_position_once() -> None:
    history = History(prompt_length=2)
    history.extend(0, [4, 5])
    history.extend(2, [6])
    history.extend(2, [6, 7, 7])  # the sampled token again, as the first of a row of forced tokens
    counts = dict(zip(history.ids.tolist(), history.output_counts.tolist(), strict=True))
    assert counts == {4: 0.0, 5: 0.0, 6: 1.0, 7: 2.0}
    assert history.known == 5


def test_history_grows() -> None:
    history = History(prompt_length=0)
    history.extend(0, list(range(1000)))
    assert history.ids.tolist() == list(range(1000))
    assert history.output_counts.sum() == 1000


def test_bias_and_min_new_tokens() -> None:
    values = np.array([5.0, -100.0, 1.0], dtype="<f4")
    biased = edits_of([1], [], logit_bias_ids=pack([3, 4, 3]), logit_bias_values=values.tobytes())
    early = edits_of([1], [], min_new_tokens=2, stop_token_ids=(9, 10, 5000))
    logits = logits_of(3)
    before = logits.clone()
    apply_edits(logits, [RowEdit(0, 1, biased), RowEdit(1, 2, early), RowEdit(2, 3, early)])
    assert logits[0, 3] == pytest.approx(float(before[0, 3]) + 6.0, abs=1e-5)
    assert logits[0, 4] == pytest.approx(float(before[0, 4]) - 100.0, abs=1e-5)
    assert torch.isneginf(logits[1]).nonzero().squeeze(1).tolist() == [9, 10]
    assert torch.equal(logits[2], before[2])


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 0], [1]])
def test_masks_forbid_what_has_no_bit(rows: list[int]) -> None:
    generator = np.random.default_rng(len(rows))
    allowed = generator.random((len(rows), VOCAB)) < 0.5
    padded = np.zeros((len(rows), 96), dtype=np.uint8)
    padded[:, :VOCAB] = allowed
    words = np.packbits(padded, axis=1, bitorder="little").view("<u4")
    logits = logits_of(3)
    expected = logits.numpy().copy()
    for row, bits in zip(rows, allowed, strict=True):
        expected[row][~bits] = -np.inf
    apply_masks(logits, np.array(rows), words)
    assert np.array_equal(logits.numpy(), expected)


def test_top_scores_of_equal_logits_come_by_id() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[1, 50] = 1.0
    scores = score(logits, np.array([0, 0]), ScoreSpec(3, np.zeros(0, dtype=np.int64)))
    assert np.frombuffer(scores.top_ids, "<i4").tolist() == [0, 1, 2, 50, 0, 1]
