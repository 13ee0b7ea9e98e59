"""Which tokens survive top-k, top-p and min-p, and which of them a uniform picks; leaves logits to the sampler.

Works on weights e = exp((logit - max) / temperature), float32, so the largest weight of a row is 1. Only passes over
the whole vocabulary run on the device; the few candidates of a row are sorted on the host.

A threshold t per row is found such that {e >= t} surely holds all survivors. It comes from block maxima: at least k
elements are >= the k-th largest block maximum. Where the nucleus turns out not to fit, t is lowered for that row.

Survivors are the first elements in the order (weight descending, id ascending): all above some weight and, of those
equal to it, the lowest ids. So only values are sorted, a tie is cut the same way in every batch, and the pick walks
the survivors in vocabulary order.
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
    """Padded rows [n, width] in vocabulary order."""

    ids: Ints
    values: NDArray[np.float32]


def is_host(tensor: torch.Tensor) -> bool:
    """Whether NumPy may work on the tensor in place: there it is several times faster than torch."""
    return tensor.device.type == "cpu"


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
    for threshold_of in (_first_threshold, _lower_threshold):
        part, chosen = _rows_of(weights, todo), filters.take(todo)
        threshold = threshold_of(part, chosen)
        candidates = gather_candidates(part, threshold, padding=0.0)
        enough = _is_enough(candidates.values, threshold, totals[todo], chosen)
        tokens[todo[enough]] = _pick_among(candidates, totals[todo], chosen, uniforms[todo])[enough]
        todo = todo[~enough]
        if not len(todo):
            return tokens
    for row in todo:  # one at a time: this many elements are quicker alone in the cache
        one = np.array([row])
        whole = Candidates(np.arange(weights.shape[1])[None], _rows_of(weights, one).cpu().numpy())
        tokens[one] = _pick_among(whole, totals[one], filters.take(one), uniforms[one])
    return tokens


def _rows_of(weights: torch.Tensor, rows: Ints) -> torch.Tensor:
    return weights if len(rows) == weights.shape[0] else weights[torch.from_numpy(rows).to(weights.device)]


def gather_candidates(values: torch.Tensor, threshold: NDArray[np.float32], padding: float) -> Candidates:
    """All elements of values [n, V] that are >= their row's threshold; shorter rows end in `padding`."""
    n, width = values.shape
    hits = values >= torch.from_numpy(threshold).to(values.device).unsqueeze(1)
    if is_host(values):
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
    dense = np.full(shape, padding, dtype=np.float32)
    ids[rows, columns] = flat - rows * width
    dense[rows, columns] = found
    return Candidates(ids, dense)


def top_threshold(values: torch.Tensor, k: int) -> NDArray[np.float32]:
    """For each row of values [n, V] a bound that at least k elements reach, and not many more."""
    if k > values.shape[1] // BLOCK:
        return kth_largest(values, k)
    return np.ascontiguousarray(_block_peaks(values)[:, -k])


def kth_largest(values: torch.Tensor, k: int) -> NDArray[np.float32]:
    """The k-th largest element of each row of values [n, V], 1 <= k <= V."""
    if is_host(values):
        at = values.shape[1] - k
        return np.ascontiguousarray(np.partition(values.numpy(), at, axis=1)[:, at])
    return np.ascontiguousarray(values.topk(k, dim=1).values[:, -1].cpu().numpy())


def descending(values: NDArray[np.float32]) -> Ints:
    """Column order (value descending, id ascending) of padded candidates [n, width]."""
    return np.argsort(-values, axis=1, kind="stable")


def _block_peaks(values: torch.Tensor) -> NDArray[np.float32]:
    # Ascending [n, V // BLOCK]; what is beyond the last whole block only ever adds elements.
    n, width = values.shape
    blocks = width // BLOCK
    peaks = values[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK)).amax(2)
    return np.sort(peaks.cpu().numpy(), axis=1)


def _first_threshold(weights: torch.Tensor, filters: Filters) -> NDArray[np.float32]:
    peaks = _block_peaks(weights)
    n, blocks = peaks.shape
    wanted = np.where(filters.top_k > 0, filters.top_k, np.where(filters.top_p < 1.0, FIRST_CANDIDATES, blocks))
    threshold = peaks[np.arange(n), np.maximum(blocks - wanted, 0)]
    return _floor(threshold, filters)


def _lower_threshold(weights: torch.Tensor, filters: Filters) -> NDArray[np.float32]:
    wanted = int(max(MORE_CANDIDATES, filters.top_k.max(initial=0)))
    return _floor(kth_largest(weights, min(wanted, weights.shape[1])), filters)


def _floor(threshold: NDArray[np.float32], filters: Filters) -> NDArray[np.float32]:
    only_min_p = (filters.top_k <= 0) & (filters.top_p >= 1.0)
    found = np.where(only_min_p, 0.0, threshold)
    return np.maximum(found, _lowest_needed(filters)).astype(np.float32)


def _lowest_needed(filters: Filters) -> NDArray[np.float32]:
    # No survivor lies below min-p; but a nucleus inside a top-k is a share of the whole top-k's mass.
    whole_top_k = (filters.top_k > 0) & (filters.top_p < 1.0)
    return np.maximum(np.where(whole_top_k, 0.0, filters.min_p), SMALLEST).astype(np.float32)


def _is_enough(
    values: NDArray[np.float32], threshold: NDArray[np.float32], totals: Floats, filters: Filters
) -> NDArray[np.bool_]:
    by_rank = (filters.top_k > 0) & ((values > 0).sum(axis=1) >= filters.top_k)
    by_mass = (filters.top_k <= 0) & (filters.top_p < 1.0)
    by_mass &= values.sum(axis=1, dtype=np.float64) >= filters.top_p * totals
    by_floor = threshold <= _lowest_needed(filters)
    return by_rank | by_mass | by_floor


def _pick_among(candidates: Candidates, totals: Floats, filters: Filters, uniforms: Floats) -> Ints:
    values = candidates.values
    kept = np.where(_survivors(values, totals, filters), values, np.float32(0.0))
    below = np.cumsum(kept, axis=1, dtype=np.float64)
    column = _first_above(below, kept, uniforms * below[:, -1])
    return np.take_along_axis(candidates.ids, column[:, None], axis=1)[:, 0]


def _survivors(values: NDArray[np.float32], totals: Floats, filters: Filters) -> NDArray[np.bool_]:
    ranked = np.sort(values, axis=1)[:, ::-1]
    width = values.shape[1]
    at = np.arange(len(values))
    running = np.cumsum(ranked, axis=1, dtype=np.float64)
    top_k = np.where(filters.top_k > 0, np.minimum(filters.top_k, width), width)
    base = np.where(filters.top_k > 0, running[at, top_k - 1], totals)
    in_nucleus = ((running - ranked) < (filters.top_p * base)[:, None]).sum(axis=1)
    over_floor = (ranked >= filters.min_p[:, None]).sum(axis=1)
    # The best candidate survives whatever the numbers say.
    count = np.maximum(np.minimum(np.minimum(top_k, in_nucleus), over_floor), 1)
    last = ranked[at, count - 1][:, None]
    equal_kept = count - (ranked > last).sum(axis=1)
    equal = values == last
    if (equal.sum(axis=1) != equal_kept).any():
        equal &= np.cumsum(equal, axis=1) <= equal_kept[:, None]
    survivors: NDArray[np.bool_] = (values > last) | equal
    return survivors


def _first_above(below: Floats, parts: NDArray, target: Floats) -> Ints:
    """First column whose running sum exceeds the target; rounding never runs past the last positive part."""
    column = (below <= target[:, None]).sum(axis=1)
    last = parts.shape[1] - 1 - np.argmax(parts[:, ::-1] > 0, axis=1)
    return np.minimum(column, last)
