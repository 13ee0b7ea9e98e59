"""Changes to logits before sampling: penalties, logit_bias, min_new_tokens and bitmasks, in that order.

Everything but bitmasks is sparse: one gather and one scatter over the touched (row, token) pairs of all rows together.
Leaves choosing to the sampler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.history import History
from shared.messages.request import SamplingParams

Ints = NDArray[np.int64]
Words = NDArray[np.uint32]


class SlotEdits:
    """What one slot's logits go through. Raises ValueError where a biased token is not in the vocabulary."""

    def __init__(self, params: SamplingParams, prompt_length: int, vocab_size: int) -> None:
        self.repetition = params.repetition_penalty
        self.frequency = params.frequency_penalty
        self.presence = params.presence_penalty
        self.min_new_tokens = params.min_new_tokens
        self.prompt_length = prompt_length
        penalised = (self.repetition, self.frequency, self.presence) != (1.0, 0.0, 0.0)
        self.history = History(prompt_length) if penalised else None
        self.bias_ids = np.frombuffer(params.logit_bias_ids, dtype="<i4").astype(np.int64)
        self.bias_values = np.frombuffer(params.logit_bias_values, dtype="<f4").astype(np.float32)
        if len(self.bias_ids) != len(self.bias_values):
            raise ValueError("logit_bias has unequal numbers of ids and values")
        if len(self.bias_ids) and not (self.bias_ids.min() >= 0 and self.bias_ids.max() < vocab_size):
            raise ValueError(f"logit_bias names a token outside the vocabulary of {vocab_size}")
        self.stop_ids = np.array([i for i in params.stop_token_ids if 0 <= i < vocab_size], dtype=np.int64)

    @staticmethod
    def of(params: SamplingParams, prompt_length: int, vocab_size: int) -> SlotEdits | None:
        """None where the logits stay as they are."""
        edits = SlotEdits(params, prompt_length, vocab_size)
        lasting = edits.history is not None or len(edits.bias_ids) > 0
        return edits if lasting or edits.min_new_tokens > 0 else None

    def forbids_stop(self, position: int) -> bool:
        """Whether the token drawn at `position` must not be a stop token."""
        return position - self.prompt_length < self.min_new_tokens


@dataclass(frozen=True, slots=True)
class RowEdit:
    """One row's edits: which row of the logits, and the position of the token it draws."""

    row: int
    position: int
    edits: SlotEdits
    may_forbid_stops: bool = True


def apply_edits(logits: torch.Tensor, rows: Sequence[RowEdit]) -> None:
    """Penalise, bias and forbid in place; logits float32 [n, vocab] contiguous."""
    flat = logits.view(-1)
    width = logits.shape[1]
    _penalise(flat, width, [r for r in rows if r.edits.history is not None])
    biased = [r for r in rows if len(r.edits.bias_ids)]
    if biased:
        where = np.concatenate([r.row * width + r.edits.bias_ids for r in biased])
        values = np.concatenate([r.edits.bias_values for r in biased])
        flat.index_put_((_on(flat, where),), _on(flat, values), accumulate=True)
    early = [r for r in rows if r.may_forbid_stops and len(r.edits.stop_ids) and r.edits.forbids_stop(r.position)]
    if early:
        where = np.concatenate([r.row * width + r.edits.stop_ids for r in early])
        flat[_on(flat, where)] = float("-inf")


def apply_masks(logits: torch.Tensor, rows: Ints, words: Words) -> None:
    """Forbid in place: bit i of word w of words [m, ceil(vocab / 32)] allows token 32 w + i in that row of `rows`."""
    bits = np.unpackbits(words.astype("<u4", copy=False).view(np.uint8), axis=1, bitorder="little")
    forbidden = _on(logits, bits[:, : logits.shape[1]] == 0)
    if are_all_rows(rows, logits):
        logits.masked_fill_(forbidden, float("-inf"))
        return
    where = _on(logits, rows)
    logits[where] = logits[where].masked_fill_(forbidden, float("-inf"))


def are_all_rows(rows: Ints, logits: torch.Tensor) -> bool:
    """Whether a mask for `rows` fits the logits as they lie, with no copy of some."""
    return len(rows) == logits.shape[0] and np.array_equal(rows, np.arange(len(rows)))


def allows_more_than_stops(words: Words, edits: SlotEdits) -> bool:
    """Whether a mask row [ceil(vocab / 32)] allows anything but the slot's stop tokens."""
    rest = words.copy()
    for token in edits.stop_ids.tolist():
        rest[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
    return bool(rest.any())


def _penalise(flat: torch.Tensor, width: int, rows: Sequence[RowEdit]) -> None:
    touched = [(r, r.edits.history) for r in rows if r.edits.history is not None and len(r.edits.history.ids)]
    if not touched:
        return
    sizes = [len(h.ids) for _, h in touched]
    where = _on(flat, np.concatenate([r.row * width + h.ids for r, h in touched]))
    counts = _on(flat, np.concatenate([h.output_counts for _, h in touched]))

    def column(values: list[float]) -> torch.Tensor:
        return _on(flat, np.repeat(np.array(values, dtype=np.float32), sizes))

    repetition = column([r.edits.repetition for r, _ in touched])
    frequency = column([r.edits.frequency for r, _ in touched])
    presence = column([r.edits.presence for r, _ in touched])
    values = flat[where]
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[where] = values - frequency * counts - presence * (counts > 0)


def _on(like: torch.Tensor, values: NDArray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)
