"""Linear layers as plain tensors, with a mode whose sums do not depend on how many rows come along."""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROW_TILE = 16


class Linear:
    """y = x W^T + b; weight [out, in], bias [out] or None.

    `row_tile` 0 multiplies all rows at once. A positive tile feeds the product that many rows at a
    time, padded with zeros, so that a row meets the same kernel alone and in any batch.
    """

    __slots__ = ("bias", "row_tile", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.row_tile = 0

    @staticmethod
    def empty(outputs: int, inputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> Linear:
        weight = torch.empty((outputs, inputs), dtype=dtype, device=device)
        return Linear(weight, torch.empty(outputs, dtype=dtype, device=device) if bias else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.row_tile == 0:
            return F.linear(x, self.weight, self.bias)
        return self._tiled(x)

    def make_deterministic(self) -> None:
        """Choose a tile whose rows do not influence each other; one row at a time where no larger tile holds."""
        self.row_tile = ROW_TILE if _rows_are_independent(self, ROW_TILE) else 1

    def _tiled(self, x: torch.Tensor) -> torch.Tensor:
        rows, tile = x.shape[0], self.row_tile
        out = x.new_empty((rows, self.weight.shape[0]))
        whole = rows - rows % tile
        for start in range(0, whole, tile):
            out[start : start + tile] = F.linear(x[start : start + tile], self.weight, self.bias)
        if whole < rows:
            padded = x.new_zeros((tile, x.shape[1]))
            padded[: rows - whole] = x[whole:]
            out[whole:] = F.linear(padded, self.weight, self.bias)[: rows - whole]
        return out


def _rows_are_independent(layer: Linear, tile: int) -> bool:
    """Whether one row gives the same bits at every place of a tile, beside zeros and beside other rows."""
    weight = layer.weight
    generator = torch.Generator(device=weight.device).manual_seed(0)
    rows = torch.randn((tile, weight.shape[1]), generator=generator, device=weight.device).to(weight.dtype)
    expected = F.linear(rows, weight, layer.bias)
    for shift in range(1, tile):
        if not torch.equal(F.linear(rows.roll(shift, 0), weight, layer.bias).roll(-shift, 0), expected):
            return False
    alone = torch.zeros_like(rows)
    alone[0] = rows[0]
    return torch.equal(F.linear(alone, weight, layer.bias)[0], expected[0])
