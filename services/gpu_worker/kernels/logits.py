"""Passes over logits as functions of torch tensors: blocks, bitmasks, draws, scores. Leaves what is wanted to callers.

CPU tensors of fp32 [n, vocab] whose last axis is contiguous. `kernels` is the loaded library. Most of what is asked of
a row is in a few of its blocks, or in what is known of them; the product that makes the logits notes it on its way.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.edit_columns import EditColumns
from services.gpu_worker.kernels import NativeUnavailable, library
from services.gpu_worker.kernels.library import BlockCall, BlockTable, DrawCall, EditCall, Library, MaskCall, ScoreCall
from services.gpu_worker.sampling_columns import SamplingColumns

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Floats32 = NDArray[np.float32]

BLOCK = 32
"""Logits of a block: those of a word of a bitmask."""
MOST_TOP = 64
"""Of the likeliest tokens of a row: each one found is inserted among those before."""


@functools.cache
def kernels_for(device: torch.device) -> Library | None:
    """The loaded library, where logits lie in its reach and it can be built."""
    if device.type != "cpu":
        return None
    try:
        return library.load()
    except NativeUnavailable:
        return None


@dataclass(frozen=True, slots=True)
class Blocks:
    """What is known of each BLOCK logits of every row; whoever changes logits keeps it true.

    peaks   fp32 [n, ceil(vocab / BLOCK)]: the largest logit, NaN where any is
    sums    alike, of 2^((logit - peak) * scale) in rows whose scale is not 0
    scales  fp32 [n]: log2(e) / temperature of who draws from all tokens, LOG2E of who wants scores
    """

    kernels: Library
    peaks: torch.Tensor
    sums: torch.Tensor
    scales: torch.Tensor
    is_lasting: bool = False  # this and the logits it is about serve every step of so many rows
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", self.scales.shape[0])

    @staticmethod
    def empty(kernels: Library, rows: int, vocab: int) -> Blocks:
        """Memory for so many rows, which no sums are wanted of."""
        peaks, sums = torch.empty(2, rows, blocks_of(vocab), dtype=torch.float32)
        return Blocks(kernels, peaks, sums, torch.zeros(rows, dtype=torch.float32))

    @staticmethod
    def of(kernels: Library, logits: torch.Tensor, scales: torch.Tensor | None = None) -> Blocks:
        """Found by reading all of the logits."""
        blocks = Blocks.empty(kernels, *logits.shape)
        if scales is not None:
            blocks.scales.copy_(scales)
        call = BlockCall(
            logits.data_ptr(),
            blocks.table(logits),
            logits.stride(0),
            len(logits),
            logits.shape[1],
            threads_for(len(logits)),
        )
        kernels.functions.rf_blocks(kernels.isa_id, call)
        return blocks

    def table(self, logits: torch.Tensor) -> BlockTable:
        """For a kernel. Raises ValueError unless this can be about `logits`."""
        _check(logits)
        shape = (logits.shape[0], blocks_of(logits.shape[1]))
        if self.peaks.shape != shape or self.peaks.stride(1) != 1 or self.scales.shape != shape[:1]:
            raise ValueError(f"blocks {tuple(self.peaks.shape)} do not fit logits {tuple(logits.shape)}")
        return BlockTable(self.peaks.data_ptr(), self.sums.data_ptr(), self.scales.data_ptr(), self.peaks.stride(0))

    def first(self, count: int, *, is_lasting: bool = False) -> Blocks:
        """Of the first `count` rows."""
        return Blocks(self.kernels, self.peaks[:count], self.sums[:count], self.scales[:count], is_lasting)

    def take(self, rows: torch.Tensor) -> Blocks:
        """Of some rows, which are copied."""
        return Blocks(self.kernels, self.peaks[rows], self.sums[rows], self.scales[rows])

    def copy(self) -> Blocks:
        return Blocks(self.kernels, self.peaks.clone(), self.sums.clone(), self.scales.clone())


def blocks_of(vocab: int) -> int:
    return -(-vocab // BLOCK)


def edit_rows(
    logits: torch.Tensor, blocks: Blocks, columns: EditColumns, slots: Ints, positions: Ints, keeps_stops: Flags | None
) -> None:
    """Row i gets the edits of `slots` [n], for a token at `positions` [n]. `keeps_stops` [n]: stop tokens stay."""
    slots, positions = np.ascontiguousarray(slots, np.int64), np.ascontiguousarray(positions, np.int64)
    table = blocks.table(logits)
    if not len(slots) == len(positions) == len(logits) or (keeps_stops is not None and len(keeps_stops) != len(slots)):
        raise ValueError("a slot and a position for each row of the logits")
    if len(slots) and int(slots.view(np.uint64).max()) >= len(columns):
        raise ValueError("no such slot")
    call = EditCall(
        logits.data_ptr(),
        table,
        slots.ctypes.data,
        positions.ctypes.data,
        None if keeps_stops is None else keeps_stops.ctypes.data,
        *columns.addresses,
        logits.stride(0),
        len(slots),
        logits.shape[1],
        threads_for(len(slots)),
    )
    blocks.kernels.functions.rf_edit(blocks.kernels.isa_id, call)


def mask_rows(
    logits: torch.Tensor, blocks: Blocks, rows: Ints, words: NDArray[np.uint32], likeliest: Flags | None = None
) -> None:
    """Forbid in place: bit i of word w of words [m, ceil(vocab / 32)] allows token 32 w + i in that row of `rows`.

    `likeliest` [m]: rows of which nobody will want more than the likeliest token. Only the block it is in is true
    afterwards; the others keep their logits, or have a peak of minus infinity, or both.
    """
    table = blocks.table(logits)
    rows, words = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(words, np.uint32)
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < logits.shape[0]:
        raise ValueError("a row is not in the logits")
    if words.shape != (len(rows), blocks_of(logits.shape[1])):
        raise ValueError(f"masks {words.shape} do not fit {len(rows)} rows of logits {tuple(logits.shape)}")
    if likeliest is not None and (len(likeliest) != len(rows) or likeliest.dtype != np.bool_):
        raise ValueError("a flag for each masked row")
    flags = None if likeliest is None else np.ascontiguousarray(likeliest)
    call = MaskCall(
        logits.data_ptr(),
        table,
        words.ctypes.data,
        rows.ctypes.data,
        None if flags is None else flags.ctypes.data,
        logits.stride(0),
        words.shape[1],
        len(rows),
        logits.shape[1],
        torch.get_num_threads(),
    )
    blocks.kernels.functions.rf_mask(blocks.kernels.isa_id, call)


@dataclass(frozen=True, slots=True)
class RowScores:
    """Log-probabilities of n rows; equal ones come in the order of their tokens."""

    norms: Floats32  # [n]: what to take off a logit
    chosen: Floats32  # [n], of the targets
    top_ids: NDArray[np.int32]  # [n, top], the likeliest
    top_logprobs: Floats32  # [n, top]


def score_rows(logits: torch.Tensor, blocks: Blocks, targets: Ints, top: int) -> RowScores:
    """Of `targets` [n] and the `top` likeliest, at most MOST_TOP."""
    table, targets = blocks.table(logits), np.ascontiguousarray(targets, np.int64)
    n, vocab = logits.shape
    if not 0 <= top <= min(MOST_TOP, vocab):
        raise ValueError(f"the {top} likeliest of {vocab} tokens, at most {MOST_TOP}")
    if len(targets) != n or (n and int(targets.view(np.uint64).max()) >= vocab):
        raise ValueError("a target for each row of the logits")
    norms, chosen, logprobs = np.empty(n, np.float32), np.empty(n, np.float32), np.empty((n, top), np.float32)
    ids = np.empty((n, top), np.int32)
    call = ScoreCall(
        logits.data_ptr(),
        table,
        *(column.ctypes.data for column in (targets, norms, chosen, logprobs, ids)),
        logits.stride(0),
        n,
        vocab,
        top,
        threads_for(n),
    )
    blocks.kernels.functions.rf_score(blocks.kernels.isa_id, call)
    return RowScores(norms, chosen, ids, logprobs)


class Draws:
    """Draws from logits that lie in one place: all but slots and positions is prepared once."""

    def __init__(self, logits: torch.Tensor, blocks: Blocks, columns: SamplingColumns, scratch: torch.Tensor) -> None:
        """logits [n, vocab] and what is known of them; columns: the slots' parameters; scratch: `draw_scratch` floats.

        Their memory is kept. Raises ValueError.
        """
        n, vocab = logits.shape
        threads = threads_for(n)
        if scratch.numel() < draw_scratch(blocks.kernels, vocab, threads):
            raise ValueError(f"no room to draw in with {threads} threads")
        self._held = (logits, blocks, columns, scratch)
        self._run, self._isa = blocks.kernels.functions.rf_draw, blocks.kernels.isa_id
        self._slots, self._positions, self._tokens = (np.zeros(n, np.int64) for _ in range(3))
        self._highest = np.zeros(n, np.float32)
        own = (self._slots, self._positions, self._tokens, self._highest)
        self._call = DrawCall(
            logits.data_ptr(),
            blocks.table(logits),
            *columns.addresses,
            *(column.ctypes.data for column in own),
            scratch.data_ptr(),
            logits.stride(0),
            n,
            vocab,
            len(columns.greedy),
            threads,
        )

    def is_of(self, logits: torch.Tensor, blocks: Blocks, columns: SamplingColumns) -> bool:
        """Whether these are the objects it was prepared for."""
        held = self._held
        return held[0] is logits and held[1] is blocks and held[2] is columns

    def run(self, slots: Ints, positions: Ints) -> tuple[Ints, NDArray[np.float32]]:
        """A token of each row [n], and its largest logit [n], NaN where any is; without a finite one any token.

        The same tokens as selection.py picks. Both last until the next call. Raises ValueError.
        """
        if len(slots) != len(self._slots) or len(positions) != len(self._slots):
            raise ValueError("a slot and a position for each row of the logits")
        self._slots[:], self._positions[:] = slots, positions
        if self._run(self._isa, self._call):
            raise ValueError("a row's slot has no parameters")
        return self._tokens, self._highest


@functools.cache
def draw_scratch(kernels: Library, vocab: int, threads: int) -> int:
    """Floats that drawing needs."""
    return int(kernels.functions.rf_draw_floats(vocab)) * threads


def threads_for(rows: int) -> int:
    """One row is done before another thread is awake."""
    return torch.get_num_threads() if rows > 1 else 1


def _check(logits: torch.Tensor) -> None:
    """Raises ValueError for logits that no kernel reads."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"no kernel for logits of {logits.dtype} on {logits.device.type}")
