"""The gated feed-forward block of a dense layer. Leaves experts to `moe`, the sum over ranks to the decoder."""

from __future__ import annotations

from functools import partial

import torch

from services.gpu_worker.layers.activation import ACTIVATIONS, gated, gated_by_row
from services.gpu_worker.layers.linear import Linear


class GatedMlp:
    """down(activation(gate(x)) * up(x)); gate and up are one weight, gate first."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        activation: str,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool,
    ) -> None:
        self.gate_up = Linear.empty(2 * intermediate, hidden, bias=bias, dtype=dtype, device=device)
        self.down = Linear.empty(hidden, intermediate, bias=bias, dtype=dtype, device=device)
        self._gated = partial(gated_by_row if deterministic else gated, activation=ACTIVATIONS[activation])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, hidden]."""
        return self.down(self._gated(self.gate_up(x)))

    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    def targets(self) -> dict[str, torch.Tensor]:
        """Where a checkpoint's tensors belong, by their names below the layer."""
        half = self.gate_up.outputs // 2
        found: dict[str, torch.Tensor] = {}
        for name, linear, rows in (
            ("gate_proj", self.gate_up, slice(0, half)),
            ("up_proj", self.gate_up, slice(half, None)),
            ("down_proj", self.down, slice(None)),
        ):
            found[f"mlp.{name}.weight"] = linear.weight[rows]
            if linear.bias is not None:
                found[f"mlp.{name}.bias"] = linear.bias[rows]
        return found
