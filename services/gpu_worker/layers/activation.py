"""Gated feed-forward activations. Leaves the matrix products to `linear`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


def gated(x: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """x [T, 2n] holds gate and up side by side; returns activation(gate) * up, [T, n]."""
    gate, up = x.chunk(2, dim=-1)
    return activation(gate).mul_(up)


def gated_by_row(x: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """As `gated`, one row at a time: vector kernels round a tail differently, and where a tail falls depends on T."""
    out = x.new_empty((x.shape[0], x.shape[1] // 2))
    for row in range(x.shape[0]):
        out[row] = gated(x[row], activation)
    return out
