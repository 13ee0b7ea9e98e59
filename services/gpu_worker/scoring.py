"""Raw log-probabilities (before temperature, penalties and masks) as `Scores`; leaves who wants them to callers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.kernels import logits as passes
from services.gpu_worker.selection import descending, gather_candidates, top_threshold
from shared.messages.stream import Scores

Ints = NDArray[np.int64]
Floats32 = NDArray[np.float32]

_ROWS_AT_ONCE = 64  # bounds the temporaries of a long scored prompt


@dataclass(frozen=True, slots=True)
class ScoreSpec:
    """What one request wants to know at each scored position."""

    top: int  # how many of the likeliest tokens
    wanted: Ints  # ids reported at every position


def score(logits: torch.Tensor, targets: Ints, spec: ScoreSpec) -> Scores:
    """Scores of `targets` [n] under raw logits float32 [n, vocab]."""
    parts = [
        _score_part(logits[i : i + _ROWS_AT_ONCE], targets[i : i + _ROWS_AT_ONCE], spec)
        for i in range(0, len(targets), _ROWS_AT_ONCE)
    ]
    return join(parts)


def score_each(logits: torch.Tensor, targets: Ints, specs: Sequence[ScoreSpec]) -> list[Scores]:
    """One Scores for each row of logits float32 [n, vocab], each by its own spec."""
    norms, top_ids, top_values = _norms_and_top(logits, min(max(spec.top for spec in specs), logits.shape[1]))
    chosen = _chosen(logits, targets, norms).astype("<f4")
    top_ids = top_ids.astype("<i4")
    top_logprobs = (top_values - norms[:, None]).astype("<f4")
    return [
        Scores(
            count=1,
            logprobs=chosen[row].tobytes(),
            top_ids=top_ids[row, : spec.top].tobytes(),
            top_logprobs=top_logprobs[row, : spec.top].tobytes(),
            wanted=_wanted(logits[row : row + 1], spec, norms[row : row + 1]),
        )
        for row, spec in enumerate(specs)
    ]


def unscored(spec: ScoreSpec) -> Scores:
    """The column of the first prompt token, which nothing precedes."""
    return Scores(
        count=1,
        logprobs=_nans(1),
        top_ids=np.zeros(max(spec.top, 0), dtype="<i4").tobytes(),
        top_logprobs=_nans(max(spec.top, 0)),
        wanted=_nans(len(spec.wanted)),
    )


def join(parts: list[Scores]) -> Scores:
    """Consecutive blocks as one."""
    if len(parts) == 1:
        return parts[0]
    return Scores(
        count=sum(p.count for p in parts),
        logprobs=b"".join(p.logprobs for p in parts),
        top_ids=b"".join(p.top_ids for p in parts),
        top_logprobs=b"".join(p.top_logprobs for p in parts),
        wanted=b"".join(p.wanted for p in parts),
    )


def _score_part(logits: torch.Tensor, targets: Ints, spec: ScoreSpec) -> Scores:
    norms, top_ids, top_values = _norms_and_top(logits, min(spec.top, logits.shape[1]))
    return Scores(
        count=len(targets),
        logprobs=_chosen(logits, targets, norms).astype("<f4").tobytes(),
        top_ids=top_ids.astype("<i4").tobytes(),
        top_logprobs=(top_values - norms[:, None]).astype("<f4").tobytes(),
        wanted=_wanted(logits, spec, norms),
    )


def _norms_and_top(logits: torch.Tensor, top: int) -> tuple[Floats32, Ints, Floats32]:
    """Of each row what turns its logits into log-probabilities, and its likeliest tokens with their logits."""
    kernels = passes.kernels_for(logits.device)
    if kernels is not None and top <= passes.MOST_TOP and logits.stride(1) == 1:
        return passes.score_rows(kernels, logits, max(top, 0))
    return torch.logsumexp(logits, dim=1).cpu().numpy(), *_top(logits, top)


def _chosen(logits: torch.Tensor, targets: Ints, norms: Floats32) -> Floats32:
    where = torch.from_numpy(targets).to(logits.device).unsqueeze(1)
    chosen: Floats32 = logits.gather(1, where).squeeze(1).cpu().numpy()
    return chosen - norms


def _wanted(logits: torch.Tensor, spec: ScoreSpec, norms: Floats32) -> bytes:
    if not len(spec.wanted):
        return b""
    values = logits[:, torch.from_numpy(spec.wanted).to(logits.device)].cpu().numpy()
    return (values - norms[:, None]).astype("<f4").tobytes()


def _top(logits: torch.Tensor, k: int) -> tuple[Ints, Floats32]:
    # Equal logits come in the order of their ids, so that a greedy token is always the first of its list.
    if k <= 0:
        return np.zeros((len(logits), 0), dtype=np.int64), np.zeros((len(logits), 0), dtype=np.float32)
    contiguous = logits.contiguous()
    candidates = gather_candidates(contiguous, top_threshold(contiguous, k), padding=float("-inf"))
    order = descending(candidates.values)[:, :k]
    return np.take_along_axis(candidates.ids, order, axis=1), np.take_along_axis(candidates.values, order, axis=1)


def _nans(count: int) -> bytes:
    return np.full(count, np.nan, dtype="<f4").tobytes()
