"""Which tokens survive top-k, top-p and min-p, and which of them a uniform picks; leaves logits to the sampler.

Works on weights e = exp((logit - max) / temperature), float32, so the largest weight of a row is 1. Only passes over
the whole vocabulary run on the device; the few candidates of a row are sorted on the host.

A threshold t per row is found such that {e >= t} surely holds all survivors. It comes from block maxima: at least k
elements are >= the k-th largest block maximum. Where the nucleus turns out not to fit, t is lowered for that row.

Survivors are the first elements in the order (weight descending, id ascending), so a tie is cut the same way in
every batch, and the pick walks them in vocabulary order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BLOCK = 64
FIRST_CANDIDATES = 128
MORE_CANDIDATES = 2048
SMALLEST = float(np.finfo(np.float32).tiny)  # below it a weight has no probability worth the name


@dataclass(frozen=True, slots=True)
class Filters:
    """Columns [n] on the host; top_k 0: off, top_p 1: off, min_p 0: off."""

    top_k: Ints
    top_p: Floats
    min_p: Floats

    def take(self, rows: Ints) -> Filters:
        return Filters(self.top_k[rows], self.top_p[rows], self.min_p[rows])


@dataclass(frozen=True, slots=True)
class Candidates:
    """Padded rows [n, width] in vocabulary order; padding has value -inf."""

    ids: Ints
    values: NDArray[np.float32]


def pick_anywhere(weights: torch.Tensor, sums: Floats, rows: Ints, uniforms: Floats) -> Ints:
    """Inverse CDF over whole rows: weights [R, V'], its block sums [R, V' / BLOCK]; `rows` and `uniforms` [n]."""
    below = np.cumsum(sums[rows], axis=1)
    target = uniforms * below[:, -1]
    block = _first_above(below, sums[rows], target)
    at = np.arange(len(rows))
    rest = np.maximum(target - (below[at, block] - sums[rows, block]), 0.0)  # below zero it would pick a zero weight
    device = weights.device
    where = torch.from_numpy(rows * sums.shape[1] + block).to(device)
    inside = weights.view(-1, BLOCK)[where].cpu().numpy().astype(np.float64)
    return block * BLOCK + _first_above(np.cumsum(inside, axis=1), inside, rest)


def pick_filtered(weights: torch.Tensor, totals: Floats, filters: Filters, uniforms: Floats) -> Ints:
    """As `pick_anywhere` among the survivors; weights [n, V'] contiguous, totals [n] their row sums."""
    n = weights.shape[0]
    tokens = np.zeros(n, dtype=np.int64)
    todo = np.arange(n)
    for threshold_of in (_first_threshold, _lower_threshold, _no_threshold):
        part = weights if len(todo) == n else weights[torch.from_numpy(todo).to(weights.device)]
        chosen = filters.take(todo)
        threshold = threshold_of(part, chosen)
        candidates = gather_candidates(part, threshold)
        enough = _is_enough(candidates, threshold, totals[todo], chosen)
        tokens[todo[enough]] = _pick_among(candidates, totals[todo], chosen, uniforms[todo])[enough]
        todo = todo[~enough]
        if not len(todo):
            break
    return tokens


def gather_candidates(values: torch.Tensor, threshold: NDArray[np.float32]) -> Candidates:
    """All elements of values [n, V] that are >= their row's threshold."""
    n, width = values.shape
    hits = values >= torch.from_numpy(threshold).to(values.device).unsqueeze(1)
    if values.device.type == "cpu":
        flat = np.flatnonzero(hits.numpy())
        found = values.numpy().reshape(-1)[flat]
    else:
        where = hits.view(-1).nonzero().squeeze(1)
        flat = where.cpu().numpy()
        found = values.reshape(-1)[where].cpu().numpy()
    rows = flat // width
    counts = np.bincount(rows, minlength=n)
    columns = np.arange(len(flat)) - np.repeat(np.cumsum(counts) - counts, counts)
    shape = (n, int(counts.max(initial=1)))
    ids = np.zeros(shape, dtype=np.int64)
    dense = np.full(shape, -np.inf, dtype=np.float32)
    ids[rows, columns] = flat - rows * width
    dense[rows, columns] = found
    return Candidates(ids, dense)


def kth_largest(values: torch.Tensor, k: int) -> NDArray[np.float32]:
    """The k-th largest element of each row of values [n, V], 1 <= k <= V."""
    if values.device.type == "cpu":
        at = values.shape[1] - k
        return np.ascontiguousarray(np.partition(values.numpy(), at, axis=1)[:, at])
    return np.ascontiguousarray(values.topk(k, dim=1).values[:, -1].cpu().numpy())


def descending(values: NDArray[np.float32]) -> Ints:
    """Column order (value descending, id ascending) of padded candidates [n, width]."""
    return np.argsort(-values, axis=1, kind="stable")


def _first_threshold(weights: torch.Tensor, filters: Filters) -> NDArray[np.float32]:
    n, width = weights.shape
    blocks = width // BLOCK
    peaks = np.sort(weights.view(n, blocks, BLOCK).amax(2).cpu().numpy(), axis=1)
    wanted = np.where(filters.top_k > 0, filters.top_k, np.where(filters.top_p < 1.0, FIRST_CANDIDATES, blocks))
    threshold = peaks[np.arange(n), np.maximum(blocks - wanted, 0)]
    return _floor(threshold, filters)


def _lower_threshold(weights: torch.Tensor, filters: Filters) -> NDArray[np.float32]:
    wanted = int(max(MORE_CANDIDATES, filters.top_k.max(initial=0)))
    if wanted >= weights.shape[1]:
        return _no_threshold(weights, filters)
    return _floor(kth_largest(weights, wanted), filters)


def _no_threshold(weights: torch.Tensor, filters: Filters) -> NDArray[np.float32]:
    return np.full(weights.shape[0], SMALLEST, dtype=np.float32)


def _floor(threshold: NDArray[np.float32], filters: Filters) -> NDArray[np.float32]:
    only_min_p = (filters.top_k <= 0) & (filters.top_p >= 1.0)
    found = np.where(only_min_p, 0.0, threshold)
    return np.maximum(found, _lowest_needed(filters)).astype(np.float32)


def _lowest_needed(filters: Filters) -> NDArray[np.float32]:
    # No survivor lies below min-p; but a nucleus inside a top-k is a share of the whole top-k's mass.
    whole_top_k = (filters.top_k > 0) & (filters.top_p < 1.0)
    return np.maximum(np.where(whole_top_k, 0.0, filters.min_p), SMALLEST).astype(np.float32)


def _is_enough(
    candidates: Candidates, threshold: NDArray[np.float32], totals: Floats, filters: Filters
) -> NDArray[np.bool_]:
    held = candidates.values > 0
    mass = np.where(held, candidates.values, 0.0).sum(axis=1, dtype=np.float64)
    by_rank = held.sum(axis=1) >= np.where(filters.top_k > 0, filters.top_k, np.iinfo(np.int64).max)
    by_mass = (filters.top_k <= 0) & (filters.top_p < 1.0) & (mass >= filters.top_p * totals)
    by_floor = threshold <= _lowest_needed(filters)
    return by_rank | by_mass | by_floor


def _pick_among(candidates: Candidates, totals: Floats, filters: Filters, uniforms: Floats) -> Ints:
    order = descending(candidates.values)
    ranked = np.take_along_axis(candidates.values, order, axis=1)
    weight = np.where(ranked > 0, ranked, 0.0).astype(np.float64)
    rank = np.arange(ranked.shape[1])
    in_top_k = (filters.top_k[:, None] <= 0) | (rank < filters.top_k[:, None])
    weight = np.where(in_top_k, weight, 0.0)
    running = np.cumsum(weight, axis=1)
    base = np.where(filters.top_k > 0, running[:, -1], totals)
    in_nucleus = running - weight < (filters.top_p * base)[:, None]
    # The best candidate survives whatever the numbers say.
    keep = (in_top_k & in_nucleus & (ranked >= filters.min_p[:, None])) | (rank == 0)
    kept = np.zeros_like(weight)
    np.put_along_axis(kept, order, np.where(keep, weight, 0.0), axis=1)
    below = np.cumsum(kept, axis=1)
    column = _first_above(below, kept, uniforms * below[:, -1])
    return np.take_along_axis(candidates.ids, column[:, None], axis=1)[:, 0]


def _first_above(below: Floats, parts: Floats, target: Floats) -> Ints:
    """First column whose running sum exceeds the target; rounding never runs past the last positive part."""
    column = (below <= target[:, None]).sum(axis=1)
    last = parts.shape[1] - 1 - np.argmax(parts[:, ::-1] > 0, axis=1)
    return np.minimum(column, last)
