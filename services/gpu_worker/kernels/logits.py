"""Passes over logits as functions of torch tensors: bitmasks, peaks, draws, scores. Leaves what is wanted to callers.

CPU tensors of fp32 [n, vocab] whose last axis is contiguous. `kernels` is the loaded library.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.kernels import NativeUnavailable, library
from services.gpu_worker.kernels.library import DrawCall, Library, MaskCall, ScoreCall
from services.gpu_worker.sampling_columns import SampleRows

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


def mask_rows(kernels: Library, logits: torch.Tensor, rows: NDArray[np.int64], words: NDArray[np.uint32]) -> None:
    """Forbid in place: bit i of word w of words [m, ceil(vocab / 32)] allows token 32 w + i in that row of `rows`."""
    rows, words = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(words, np.uint32)
    _check(logits, rows)
    if words.shape != (len(rows), -(-logits.shape[1] // 32)):
        raise ValueError(f"masks {words.shape} do not fit {len(rows)} rows of logits {tuple(logits.shape)}")
    call = MaskCall(
        logits.data_ptr(),
        words.ctypes.data,
        rows.ctypes.data,
        logits.stride(0),
        words.shape[1],
        len(rows),
        logits.shape[1],
        torch.get_num_threads(),
    )
    kernels.functions.rf_mask(kernels.isa_id, call)


def score_rows(
    kernels: Library, logits: torch.Tensor, top: int
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]:
    """Each row's log of the sum of e^logit [n], and its `top` likeliest tokens and their logits [n, top].

    At most MOST_TOP; equal logits come in the order of their tokens.
    """
    _check(logits, np.zeros(0, np.int64))
    n, vocab = logits.shape
    if not 0 <= top <= min(MOST_TOP, vocab):
        raise ValueError(f"the {top} likeliest of {vocab} tokens, at most {MOST_TOP}")
    norms, values, tokens = np.empty(n, np.float32), np.empty((n, top), np.float32), np.empty((n, top), np.int64)
    call = ScoreCall(
        logits.data_ptr(),
        norms.ctypes.data,
        values.ctypes.data,
        tokens.ctypes.data,
        logits.stride(0),
        n,
        vocab,
        top,
        threads_for(n),
    )
    kernels.functions.rf_score(kernels.isa_id, call)
    return norms, tokens, values


def draw_rows(
    kernels: Library, logits: torch.Tensor, rows: SampleRows, scratch: torch.Tensor
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """A token of each row [n], and its largest logit [n], NaN where any of them is; without a finite one any token.

    `scratch`: fp32 of at least `draw_scratch`. The same tokens as selection.py picks.
    """
    n, vocab = logits.shape
    _check(logits, np.zeros(0, np.int64))
    threads = threads_for(n)
    if len(rows.seeds) != n or scratch.numel() < draw_scratch(kernels, vocab, threads):
        raise ValueError("parameters for each row of the logits, and room to draw in")
    tokens, peaks = np.empty(n, np.int64), np.empty(n, np.float32)
    filters = rows.filters
    columns = (rows.greedy, rows.temperature, filters.top_p, filters.min_p, filters.top_k, rows.seeds, rows.positions)
    held = [np.ascontiguousarray(column) for column in columns]
    call = DrawCall(
        logits.data_ptr(),
        *(column.ctypes.data for column in held),
        tokens.ctypes.data,
        peaks.ctypes.data,
        scratch.data_ptr(),
        logits.stride(0),
        n,
        vocab,
        threads,
    )
    kernels.functions.rf_draw(kernels.isa_id, call)
    return tokens, peaks


def draw_scratch(kernels: Library, vocab: int, threads: int) -> int:
    """Floats that drawing needs."""
    return int(kernels.functions.rf_draw_floats(vocab)) * threads


def threads_for(rows: int) -> int:
    """One row is done before another thread is awake."""
    return torch.get_num_threads() if rows > 1 else 1


def _check(logits: torch.Tensor, rows: NDArray[np.int64]) -> None:
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"no kernel for logits of {logits.dtype} on {logits.device.type}")
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < logits.shape[0]:
        raise ValueError("a row is not in the logits")
