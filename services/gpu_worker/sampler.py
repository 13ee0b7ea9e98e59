"""Logits to tokens: greedy, or temperature and filters with one counter-based uniform per row.

Leaves penalties, biases and masks to `logit_edits` (they come first), log-probabilities to `scoring`. Semantics of the
filters: temperature, then top-k, then top-p over what is left, then min-p relative to the likeliest token.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker import selection
from services.gpu_worker.kernels.library import Library
from services.gpu_worker.kernels.logits import Blocks, Draws, draw_scratch, threads_for
from services.gpu_worker.rng import uniforms
from services.gpu_worker.sampling_columns import SampleRows
from services.gpu_worker.selection import BLOCK, pick_anywhere, pick_filtered

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Sampler:
    """Holds nothing but a scratch buffer; every choice is a function of (logits, parameters, seed, position).

    With `kernels` the passes over whole rows are theirs.
    """

    def __init__(self, vocab_size: int, device: torch.device, kernels: Library | None = None) -> None:
        self._kernels = kernels
        self._width = -(-vocab_size // BLOCK) * BLOCK
        self._vocab_size = vocab_size
        self._device = device
        self._draws: dict[int, Draws] = {}  # by the number of rows, over memory that lasts
        self._scratch = torch.zeros((0, self._width), dtype=torch.float32, device=device)

    def sample(self, logits: torch.Tensor, rows: SampleRows, blocks: Blocks | None = None) -> tuple[Ints, Flags]:
        """Tokens [n] for logits float32 [n, vocab], and which rows were fit for it.

        A row is unfit where a logit is NaN or +inf or no token is allowed; its token is -1. `blocks`: of the logits.
        """
        if self._kernels is not None:
            return self._run(self._kernels, logits, rows, blocks)
        peaks = logits.amax(1)
        fit = peaks.isfinite().cpu().numpy()
        tokens = np.full(len(fit), -1, dtype=np.int64)
        greedy, drawn = np.flatnonzero(rows.greedy), np.flatnonzero(~rows.greedy & fit)
        if len(greedy):
            tokens[greedy] = _argmax(self._take(logits, greedy))
        if len(drawn):
            self._draw(logits, peaks, rows, drawn, tokens)
        tokens[~fit] = -1
        return tokens, fit

    def _run(
        self, kernels: Library, logits: torch.Tensor, rows: SampleRows, blocks: Blocks | None
    ) -> tuple[Ints, Flags]:
        """As `sample`, by the kernels."""
        blocks = Blocks.of(kernels, logits) if blocks is None else blocks
        draws = self._draws.get(blocks.rows) if blocks.is_lasting else None
        if draws is None or not draws.is_of(logits, blocks, rows.columns):
            draws = Draws(logits, blocks, rows.columns, self._room(kernels, blocks.rows))
            if blocks.is_lasting:
                self._draws[blocks.rows] = draws
        tokens, highest = draws.run(rows.slots, rows.positions)
        fit = np.isfinite(highest)
        return (tokens.copy() if fit.all() else np.where(fit, tokens, -1)), fit

    def _room(self, kernels: Library, rows: int) -> torch.Tensor:
        """The scratch buffer, large enough for draws of so many rows."""
        needed = draw_scratch(kernels, self._vocab_size, threads_for(rows))
        if self._scratch.numel() < needed:
            self._scratch = torch.zeros((1, needed), dtype=torch.float32)
        return self._scratch

    def _draw(self, logits: torch.Tensor, peaks: torch.Tensor, rows: SampleRows, drawn: Ints, tokens: Ints) -> None:
        """The tokens of the rows `drawn`."""
        weights, block_sums = self._weigh(logits, peaks, drawn, rows.temperature[drawn].astype(np.float32))
        sums = block_sums.cpu().numpy().astype(np.float64)
        numbers = uniforms(rows.seeds[drawn], rows.positions[drawn])
        filtered = rows.filtered[drawn]
        free, cut = np.flatnonzero(~filtered), np.flatnonzero(filtered)
        if len(free):
            tokens[drawn[free]] = pick_anywhere(weights, sums, free, numbers[free])
        if len(cut):
            tokens[drawn[cut]] = pick_filtered(
                self._take(weights, cut), sums[cut].sum(axis=1), rows.filters.take(drawn[cut]), numbers[cut]
            )

    def _take(self, tensor: torch.Tensor, rows: Ints) -> torch.Tensor:
        if len(rows) == tensor.shape[0]:
            return tensor
        return tensor.index_select(0, torch.from_numpy(rows).to(tensor.device))

    def _weigh(
        self, logits: torch.Tensor, peaks: torch.Tensor, rows: Ints, temperatures: NDArray[np.float32]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [n, width] of `rows` [n] of the logits, and the sums of their blocks."""
        n, blocks = len(rows), self._width // BLOCK
        if self._scratch.shape[0] < n:
            self._scratch = torch.zeros((n, self._width), dtype=torch.float32, device=self._device)
        weights = self._scratch[:n]
        inside = weights[:, : self._vocab_size]
        divisor = torch.from_numpy(temperatures).to(self._device).unsqueeze(1)
        torch.sub(self._take(logits, rows), self._take(peaks, rows).unsqueeze(1), out=inside)
        inside.div_(divisor).exp_()
        return weights, weights.view(n, blocks, BLOCK).sum(2)


def _argmax(logits: torch.Tensor) -> Ints:
    # Both give the lowest id among equals.
    if selection.is_host(logits):
        return logits.numpy().argmax(axis=1)
    return logits.argmax(1).cpu().numpy()
