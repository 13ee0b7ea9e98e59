"""Passes over logits as functions of torch tensors: bitmasks, peaks, draws, scores. Leaves what is wanted to callers.

CPU tensors of fp32 [n, vocab] whose last axis is contiguous. `kernels` is the loaded library.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.kernels import NativeUnavailable, library
from services.gpu_worker.kernels.library import DrawCall, Library, MaskCall, PeakCall, ScoreCall
from services.gpu_worker.sampling_columns import SampleRows

MOST_TOP = 64
"""Of the likeliest tokens, as the library has it."""


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


def peaks_of(kernels: Library, logits: torch.Tensor) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The largest logit of each row [n], NaN where any of them is, and the lowest token that has it [n]."""
    _check(logits, np.zeros(0, np.int64))
    n, vocab = logits.shape
    peaks, places = np.empty(n, dtype=np.float32), np.empty(n, dtype=np.int64)
    call = PeakCall(
        logits.data_ptr(), peaks.ctypes.data, places.ctypes.data, logits.stride(0), n, vocab, threads_for(n)
    )
    kernels.functions.rf_peak(kernels.isa_id, call)
    return peaks, places


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
    kernels: Library,
    logits: torch.Tensor,
    peaks: NDArray[np.float32],
    rows: NDArray[np.int64],
    params: SampleRows,
    scratch: torch.Tensor,
) -> NDArray[np.int64]:
    """The tokens [m] of `rows` [m] of the logits, each drawn by its entry of `params` [n], the peaks [n] being given.

    `scratch`: fp32 of at least `draw_scratch`. The same tokens as selection.py picks.
    """
    _check(logits, rows)
    if peaks.shape[0] != logits.shape[0] or len(params.seeds) != logits.shape[0]:
        raise ValueError("a peak and parameters for each row of the logits")
    threads = threads_for(len(rows))
    if scratch.numel() < draw_scratch(kernels, logits.shape[1], threads):
        raise ValueError("no room to draw in")
    columns = (
        np.ascontiguousarray(params.temperature[rows], np.float32),
        np.ascontiguousarray(rows, np.int64),
        np.ascontiguousarray(params.filters.top_k[rows], np.int64),
        np.ascontiguousarray(params.filters.top_p[rows], np.float64),
        np.ascontiguousarray(params.filters.min_p[rows], np.float64),
        np.ascontiguousarray(params.seeds[rows], np.uint64),
        np.ascontiguousarray(params.positions[rows], np.int64),
        np.empty(len(rows), np.int64),
    )
    call = DrawCall(
        logits.data_ptr(),
        peaks.ctypes.data,
        *(column.ctypes.data for column in columns),
        scratch.data_ptr(),
        logits.stride(0),
        len(rows),
        logits.shape[1],
        threads,
    )
    kernels.functions.rf_draw(kernels.isa_id, call)
    return columns[-1]


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
