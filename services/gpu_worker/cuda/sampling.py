"""The sampler's choice made on the device, with no word of it on the host before it is used.

The token is the one that `sampler` and `selection` choose for the same logits and uniform; they say what the filters
mean. Uniforms are functions of (seed, position), both known before the step runs, so they come with its inputs.

With top-k the best k are sorted and the cut is found among them. Without, the nucleus ends at the smallest weight v for
which all larger ones together have less than top_p of the mass. v is found by halving the range of its bit pattern,
which for positive floats is in the order of the numbers: 30 sums over the row, with neither a sort nor a loop whose
length only the device knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.rng import uniforms
from services.gpu_worker.sampling_columns import SampleRows
from services.gpu_worker.selection import BLOCK, SMALLEST

UNFIT = -1  # instead of a token: a logit is NaN or +inf
NO_TOKEN = -2  # every logit is -inf

_LARGEST_DENORMAL = 0x007FFFFF
_ONE = 0x3F800000
_HALVINGS = 30


@dataclass(frozen=True, slots=True)
class DrawShape:
    """What of a step's draws the host knows: which way each row is sampled. Rows are numbered as the logits."""

    num_rows: int
    num_greedy: int
    num_free: int  # drawn from all tokens
    num_ranked: int  # with top-k
    num_massed: int  # with top-p or min-p, without top-k
    max_k: int

    @property
    def num_drawn(self) -> int:
        return self.num_rows - self.num_greedy

    @property
    def is_mixed(self) -> bool:
        """Whether rows have to be brought into the order of their ways."""
        return self.num_rows not in (self.num_free, self.num_ranked, self.num_massed)


def draw_arrays(rows: SampleRows) -> tuple[DrawShape, dict[str, NDArray]]:
    """The step's draws as arrays to send. Drawn rows come in the order free, ranked, massed."""
    drawn, ranked = ~rows.greedy, rows.filters.top_k > 0
    kinds = (
        np.flatnonzero(rows.greedy),
        np.flatnonzero(drawn & ~rows.filtered),
        np.flatnonzero(drawn & rows.filtered & ranked),
        np.flatnonzero(drawn & rows.filtered & ~ranked),
    )
    order = np.concatenate(kinds[1:])
    filters = rows.filters.take(order)
    greedy, free, ranked_rows, massed = (len(kind) for kind in kinds)
    shape = DrawShape(len(rows.greedy), greedy, free, ranked_rows, massed, int(filters.top_k.max(initial=0)))
    if not len(order):
        return shape, {}
    return shape, {
        "draw_greedy": kinds[0],
        "draw_rows": order,
        "draw_temperature": rows.temperature[order].astype(np.float32),
        "draw_uniforms": uniforms(rows.seeds[order], rows.positions[order]),
        "draw_top_k": filters.top_k,
        "draw_top_p": filters.top_p,
        "draw_floor": _floors(filters.min_p),
    }


def _floors(min_p: NDArray[np.float64]) -> NDArray[np.float32]:
    """The smallest float32 that is not below min_p: comparing with it is comparing with min_p."""
    nearest = min_p.astype(np.float32)
    above = np.where(nearest.astype(np.float64) < min_p, np.nextafter(nearest, np.float32(2.0)), nearest)
    return np.maximum(above, np.float32(SMALLEST)).astype(np.float32)


def sample_on_device(logits: torch.Tensor, shape: DrawShape, draws: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """int64 [n] tokens, UNFIT or NO_TOKEN, for logits float32 [n, vocab] and what `draw_arrays` gave."""
    peaks = logits.amax(1)
    if not shape.num_drawn:
        tokens = logits.argmax(1)
    else:
        tokens = torch.zeros(shape.num_rows, dtype=torch.int64, device=logits.device)
        if shape.num_greedy:
            tokens[draws["draw_greedy"]] = logits.index_select(0, draws["draw_greedy"]).argmax(1)
        tokens[draws["draw_rows"]] = _draw(logits, peaks, shape, draws)
    lost = torch.where(peaks == float("-inf"), NO_TOKEN, UNFIT)
    return torch.where(peaks.isfinite(), tokens, lost)


def _draw(
    logits: torch.Tensor, peaks: torch.Tensor, shape: DrawShape, draws: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    rows = draws["draw_rows"]
    if shape.is_mixed:
        logits, peaks = logits.index_select(0, rows), peaks.index_select(0, rows)
    weights = _weights(logits, peaks, draws["draw_temperature"])
    uniform, chosen = draws["draw_uniforms"], []
    if free := shape.num_free:
        chosen.append(_pick(weights[:free], _block_sums(weights[:free]), uniform[:free]))
    start = free
    if shape.num_ranked:
        part = slice(start, start + shape.num_ranked)
        cut = _cut_ranked(weights[part], _part(draws, part), shape.max_k)
        chosen.append(_pick_kept(weights[part], cut, draws["draw_floor"][part], uniform[part]))
    start += shape.num_ranked
    if shape.num_massed:
        part = slice(start, start + shape.num_massed)
        cut = _cut_massed(weights[part], _block_sums(weights[part]).sum(1) * draws["draw_top_p"][part])
        chosen.append(_pick_kept(weights[part], cut, draws["draw_floor"][part], uniform[part]))
    tokens = torch.cat(chosen) if len(chosen) > 1 else chosen[0]
    return tokens.clamp(max=logits.shape[1] - 1)  # a row of NaN may have gone anywhere


def _part(draws: Mapping[str, torch.Tensor], part: slice) -> dict[str, torch.Tensor]:
    return {name: draws[name][part] for name in ("draw_top_k", "draw_top_p", "draw_floor")}


def _weights(logits: torch.Tensor, peaks: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """exp((logit - peak) / temperature), float32 [n, vocab rounded up to whole blocks], zeros at the end."""
    n, vocab = logits.shape
    weights = torch.zeros((n, -(-vocab // BLOCK) * BLOCK), dtype=torch.float32, device=logits.device)
    inside = weights[:, :vocab]
    torch.sub(logits, peaks.unsqueeze(1), out=inside)
    inside.div_(temperature.unsqueeze(1)).exp_()
    return weights


def _block_sums(weights: torch.Tensor) -> torch.Tensor:
    """float64 [n, V' / BLOCK], of blocks that were added up in float32 as the sampler of a host adds them."""
    return weights.view(len(weights), -1, BLOCK).sum(2).double()


@dataclass(frozen=True, slots=True)
class _Cut:
    """Survivors: weights above `last`, and of those equal to it the first `equal` in vocabulary order; [n, 1] each."""

    last: torch.Tensor
    equal: torch.Tensor


def _cut_ranked(weights: torch.Tensor, filters: Mapping[str, torch.Tensor], max_k: int) -> _Cut:
    ranked = weights.topk(min(max_k, weights.shape[1]), dim=1).values
    top_k = filters["draw_top_k"].clamp(max=ranked.shape[1])
    running = ranked.cumsum(1, dtype=torch.float64)
    base = running.gather(1, top_k.unsqueeze(1) - 1)
    in_nucleus = ((running - ranked) < filters["draw_top_p"].unsqueeze(1) * base).sum(1)
    over_floor = (ranked >= filters["draw_floor"].unsqueeze(1)).sum(1)
    # The best candidate survives whatever the numbers say.
    count = torch.minimum(torch.minimum(top_k, in_nucleus), over_floor).clamp(min=1).unsqueeze(1)
    last = ranked.gather(1, count - 1)
    return _Cut(last, count - (ranked > last).sum(1, keepdim=True))


def _cut_massed(weights: torch.Tensor, wanted: torch.Tensor) -> _Cut:
    """`wanted` float64 [n]: the mass that what comes before a survivor has not reached yet."""
    bits = weights.view(torch.int32)
    low = torch.full((len(weights), 1), _LARGEST_DENORMAL, dtype=torch.int32, device=weights.device)
    high = torch.full_like(low, _ONE)  # the best weight is 1
    for _ in range(_HALVINGS):
        middle = low + (high - low) // 2
        enough = _mass_above(weights, bits, middle) < wanted
        enough = enough.unsqueeze(1)
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle + 1)
    last = high.view(torch.float32)
    missing = (wanted - _mass_above(weights, bits, high)).unsqueeze(1)
    return _Cut(last, (missing / last.double()).ceil().clamp(1, weights.shape[1]).long())


def _mass_above(weights: torch.Tensor, bits: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    return torch.where(bits > bound, weights, 0.0).sum(1, dtype=torch.float64)


def _pick_kept(weights: torch.Tensor, cut: _Cut, floor: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    equal = weights == cut.last
    equal &= equal.cumsum(1, dtype=torch.int32) <= cut.equal
    kept = torch.where(((weights > cut.last) | equal) & (weights >= floor.unsqueeze(1)), weights, 0.0)
    return _pick(kept, kept.view(len(kept), -1, BLOCK).sum(2, dtype=torch.float64), uniform)


def _pick(weights: torch.Tensor, sums: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse CDF, first over blocks, then within one: weights [n, V'], float64 sums [n, V' / BLOCK]."""
    below = sums.cumsum(1)
    target = uniform * below[:, -1]
    block = _first_above(below, sums, target).unsqueeze(1)
    before = below.gather(1, block) - sums.gather(1, block)
    rest = (target.unsqueeze(1) - before).clamp(min=0.0).squeeze(1)  # below zero it would pick a zero weight
    blocks = weights.view(len(weights), -1, BLOCK)
    inside = blocks.gather(1, block.unsqueeze(2).expand(-1, 1, BLOCK)).squeeze(1).double()
    return block.squeeze(1) * BLOCK + _first_above(inside.cumsum(1), inside, rest)


def _first_above(below: torch.Tensor, parts: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First column whose running sum exceeds the target; rounding never runs past the last positive part."""
    column = (below <= target.unsqueeze(1)).sum(1)
    places = torch.arange(parts.shape[1], device=parts.device)
    last = torch.where(parts > 0, places, 0).amax(1)
    return torch.minimum(column, last)
