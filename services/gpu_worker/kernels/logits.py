"""Passes over logits as functions of torch tensors: bitmasks and sampling weights. Leaves choosing to the sampler.

CPU tensors of fp32 [n, vocab] whose last axis is contiguous. `kernels` is the loaded library.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.kernels import NativeUnavailable, library
from services.gpu_worker.kernels.library import Library, MaskCall, PeakCall, WeightCall

BLOCK = 64
"""Elements of a weight block, as the library has it."""


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


def peaks_of(kernels: Library, logits: torch.Tensor) -> tuple[torch.Tensor, NDArray[np.int64]]:
    """The largest logit of each row [n], NaN where any of them is, and the lowest token that has it [n]."""
    _check(logits, np.zeros(0, np.int64))
    n, vocab = logits.shape
    peaks, places = torch.empty(n, dtype=torch.float32), np.empty(n, dtype=np.int64)
    call = PeakCall(
        logits.data_ptr(), peaks.data_ptr(), places.ctypes.data, logits.stride(0), n, vocab, torch.get_num_threads()
    )
    kernels.functions.rf_peak(kernels.isa_id, call)
    return peaks, places


def weigh_rows(
    kernels: Library,
    logits: torch.Tensor,
    peaks: torch.Tensor,
    rows: NDArray[np.int64],
    temperatures: NDArray[np.float32],
    weights: torch.Tensor,
    sums: torch.Tensor,
) -> None:
    """weights [m, blocks * BLOCK] = exp((logit - peak) / temperature) of `rows` [m], zeros behind; sums [m, blocks].

    `peaks` [n] are those of all rows of the logits. A row's weights do not depend on the rows beside it.
    """
    rows, temperatures = np.ascontiguousarray(rows, np.int64), np.ascontiguousarray(temperatures, np.float32)
    _check(logits, rows)
    blocks = sums.shape[1]
    if blocks * BLOCK < logits.shape[1] or weights.shape != (len(rows), blocks * BLOCK) or len(sums) != len(rows):
        raise ValueError(f"weights {tuple(weights.shape)} do not fit {len(rows)} rows of {tuple(logits.shape)}")
    if not (weights.is_contiguous() and sums.is_contiguous() and peaks.is_contiguous()):
        raise ValueError("weights, sums and peaks must be contiguous")
    if peaks.shape[0] != logits.shape[0] or len(temperatures) != len(rows):
        raise ValueError("a peak for each row of the logits, a temperature for each row of weights")
    call = WeightCall(
        logits.data_ptr(),
        peaks.data_ptr(),
        temperatures.ctypes.data,
        rows.ctypes.data,
        weights.data_ptr(),
        sums.data_ptr(),
        logits.stride(0),
        len(rows),
        logits.shape[1],
        blocks,
        torch.get_num_threads(),
    )
    kernels.functions.rf_weigh(kernels.isa_id, call)


def _check(logits: torch.Tensor, rows: NDArray[np.int64]) -> None:
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"no kernel for logits of {logits.dtype} on {logits.device.type}")
    if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < logits.shape[0]:
        raise ValueError("a row is not in the logits")
