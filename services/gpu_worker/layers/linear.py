"""Linear layers as plain tensors: weights packed for the CPU's matrix units, and a mode of row-independent sums."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

ROW_TILE = 16
PACK_ROWS = 32  # the batch the packed layout is chosen for; measured good from 1 to 512 rows

Product = Callable[[torch.Tensor], torch.Tensor]
MakeProduct = Callable[[torch.Tensor, torch.Tensor | None], Product]
"""From a weight and a bias; it may raise for a weight that it cannot take."""


class Linear:
    """y = x W^T + b; weight [out, in], bias [out] or None.

    Weights are filled in place first, then `prepare` settles how to multiply. A row tile of 0
    multiplies all rows at once. A positive tile feeds the product that many rows at a time, padded
    with zeros, so that a row meets the same kernel alone and in any batch.
    """

    __slots__ = ("_product", "_row_tile", "_weight", "bias", "outputs")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.outputs = weight.shape[0]
        self.bias = bias
        self._weight: torch.Tensor | None = weight
        self._product: Product = lambda x: F.linear(x, weight, bias)
        self._row_tile = 0

    @staticmethod
    def empty(outputs: int, inputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device) -> Linear:
        weight = torch.empty((outputs, inputs), dtype=dtype, device=device)
        return Linear(weight, torch.empty(outputs, dtype=dtype, device=device) if bias else None)

    @property
    def weight(self) -> torch.Tensor:
        """The plain weight; gone once packed."""
        assert self._weight is not None
        return self._weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out]."""
        return self._product(x) if self._row_tile == 0 else self._tiled(x)

    def place(self, device: torch.device) -> None:
        """Give a weight that was made on "meta", without memory, its memory; any other stays where it is."""
        weight = self.weight
        if weight.device.type != "meta":
            return
        self._weight = weight = torch.empty_like(weight, device=device)
        self.bias = bias = None if self.bias is None else torch.empty_like(self.bias, device=device)
        self._product = lambda x: F.linear(x, weight, bias)

    def prepare(
        self, *, deterministic: bool, tiles: dict[torch.Size, int] | None = None, quantize: MakeProduct | None = None
    ) -> None:
        """Quantise or pack the weight; if `deterministic`, choose the largest tile whose rows are independent.

        `tiles` remembers the choice by shape: the order of sums depends on that, not on the numbers.
        """
        weight = self.weight
        packed = _packed_product(weight, self.bias) if quantize is None else quantize(weight, self.bias)
        if packed is not None:
            self._product, self._weight = packed, None
        if deterministic:
            known = {} if tiles is None else tiles
            if weight.shape not in known:
                rows = _trial_rows(weight, ROW_TILE)
                known[weight.shape] = ROW_TILE if _rows_are_independent(self._product, rows) else 1
            self._row_tile = known[weight.shape]

    def release(self) -> None:
        """Forget the weight, of which someone holds a copy; this layer multiplies no more."""
        self._product, self._weight = _released, None

    def _tiled(self, x: torch.Tensor) -> torch.Tensor:
        rows, tile = x.shape[0], self._row_tile
        out = x.new_empty((rows, self.outputs))
        whole = rows - rows % tile
        for start in range(0, whole, tile):
            out[start : start + tile] = self._product(x[start : start + tile])
        if whole < rows:
            padded = x.new_zeros((tile, x.shape[1]))
            padded[: rows - whole] = x[whole:]
            out[whole:] = self._product(padded)[: rows - whole]
        return out


def _released(_x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("the weight has been released")


def _packed_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product | None:
    """The product with a weight in oneDNN's blocked layout; None where plain tensors do as well or it is not there."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return None
    ops = torch.ops.mkldnn
    if not hasattr(ops, "_linear_pointwise") or not ops._is_mkldnn_bf16_supported():
        return None
    packed, outputs, run = ops._reorder_linear_weight(weight, PACK_ROWS), weight.shape[0], ops._linear_pointwise

    def product(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 0:
            return x.new_empty((0, outputs))
        result: torch.Tensor = run(x, packed, bias, "none", [], "")
        return result

    return product


def _trial_rows(weight: torch.Tensor, count: int) -> torch.Tensor:
    generator = torch.Generator(device=weight.device).manual_seed(0)
    rows = torch.randn((count, weight.shape[1]), generator=generator, device=weight.device)
    return rows.to(weight.dtype)


def _rows_are_independent(product: Product, rows: torch.Tensor) -> bool:
    """Whether one row gives the same bits at every place of a tile, beside zeros and beside other rows."""
    expected = product(rows)
    for shift in range(1, rows.shape[0]):
        if not torch.equal(product(rows.roll(shift, 0)).roll(-shift, 0), expected):
            return False
    alone = torch.zeros_like(rows)
    alone[0] = rows[0]
    return torch.equal(product(alone)[0], expected[0])
