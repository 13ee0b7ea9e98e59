"""Raw log-probabilities (before temperature, penalties and masks) as `Scores`; leaves who wants them to callers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.kernels import logits as passes
from services.gpu_worker.kernels.logits import Blocks, RowScores
from services.gpu_worker.sampling_columns import LOG2E
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


def score_each(
    logits: torch.Tensor, targets: Ints, specs: Sequence[ScoreSpec], blocks: Blocks | None = None
) -> list[Scores]:
    """One Scores for each row of logits float32 [n, vocab], each by its own spec. `blocks`: of the logits."""
    rows = _score_rows(logits, targets, min(max(spec.top for spec in specs), logits.shape[1]), blocks)
    chosen, ids, logprobs = rows.chosen.tobytes(), rows.top_ids.tobytes(), rows.top_logprobs.tobytes()
    found, width = [], 4 * rows.top_ids.shape[1]
    for row, spec in enumerate(specs):
        best = slice(row * width, row * width + min(max(4 * spec.top, 0), width))
        wanted = _wanted(logits[row : row + 1], spec, rows.norms[row : row + 1]) if len(spec.wanted) else b""
        found.append(Scores(1, chosen[4 * row : 4 * row + 4], ids[best], logprobs[best], wanted))
    return found


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
    rows = _score_rows(logits, targets, min(max(spec.top, 0), logits.shape[1]))
    return Scores(
        count=len(targets),
        logprobs=rows.chosen.tobytes(),
        top_ids=rows.top_ids.tobytes(),
        top_logprobs=rows.top_logprobs.tobytes(),
        wanted=_wanted(logits, spec, rows.norms),
    )


def _score_rows(logits: torch.Tensor, targets: Ints, top: int, blocks: Blocks | None = None) -> RowScores:
    kernels = passes.kernels_for(logits.device)
    if kernels is not None and top <= passes.MOST_TOP and logits.stride(1) == 1:
        if blocks is None:
            blocks = Blocks.of(kernels, logits, torch.full((len(logits),), LOG2E))
        return passes.score_rows(logits, blocks, targets, max(top, 0))
    norms = torch.logsumexp(logits, dim=1).cpu().numpy()
    where = torch.from_numpy(targets).to(logits.device).unsqueeze(1)
    chosen: Floats32 = logits.gather(1, where).squeeze(1).cpu().numpy()
    ids, values = _top(logits, top)
    return RowScores(norms, chosen - norms, ids.astype(np.int32), (values - norms[:, None]).astype(np.float32))


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
