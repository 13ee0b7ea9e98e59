"""A feed-forward block of experts: the router, and the experts in plain torch. Leaves fused kernels to `moe_fused`.

x [T, hidden] --router--> probabilities [T, experts] --top k--> choice, weights [T, k]
experts: the T * k pairs sorted by expert, one product per expert that has any, added up per token
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from services.gpu_worker.layers.activation import ACTIVATIONS, gated, gated_by_row
from services.gpu_worker.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """What tells one block of experts from another."""

    experts: int
    top_k: int
    intermediate: int  # of one expert
    normalised: bool  # whether the chosen probabilities are scaled to a sum of 1
    layers: tuple[bool, ...]  # per layer; False: a dense block
    block: str  # name of the block in checkpoints with a tensor per expert
    parts: tuple[str, str, str]  # names of gate, up and down there


class Experts(Protocol):
    """What runs the chosen experts."""

    def __call__(self, x: torch.Tensor, choice: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], choice int32 [T, k], weights fp32 [T, k] -> [T, hidden] in x's dtype."""
        ...


ExpertsMaker = Callable[[torch.Tensor, torch.Tensor, str], Experts | None]
"""From gate_up [experts, 2 * intermediate, hidden], down [experts, hidden, intermediate] and an activation's name.

It may change the weights in place, and keeps what it needs of them. None: not for these.
"""


class SparseMlp:
    """Router and experts of one layer. Memory is allocated here and filled by name; then `prepare`."""

    def __init__(
        self,
        config: MoeConfig,
        hidden: int,
        activation: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool,
    ) -> None:
        self._config = config
        self._activation = activation
        self._deterministic = deterministic
        self.router = Linear.empty(config.experts, hidden, bias=False, dtype=dtype, device=device)
        shape = (config.experts, 2 * config.intermediate, hidden)
        gate_up = torch.empty(shape, dtype=dtype, device=device)
        down = torch.empty((config.experts, hidden, config.intermediate), dtype=dtype, device=device)
        self._weights: tuple[torch.Tensor, torch.Tensor] | None = (gate_up, down)
        self._experts: Experts | None = None

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up, and down, stacked; gone once prepared."""
        assert self._weights is not None
        return self._weights

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        if self._experts is None:
            raise RuntimeError("experts are called before their weights are prepared")
        return self._experts(x, *self.route(x))

    @property
    def capturable(self) -> bool:
        """Whether a graph can hold it; the reference asks the host which experts have tokens."""
        return self._experts is not None and not isinstance(self._experts, SortedExperts)

    def route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Every token's experts, int32 [T, k], best first, and their weights, fp32 [T, k]."""
        probabilities = self.router(x).float().softmax(-1)
        weights, choice = probabilities.topk(self._config.top_k, dim=-1)
        if self._config.normalised:
            weights = weights / weights.sum(-1, keepdim=True)
        return choice.int(), weights

    def prepare(self, make: ExpertsMaker | None = None, *, tiles: dict[torch.Size, int] | None = None) -> None:
        """Once the weights are in place: how to run them. `make`: tried before the plain products."""
        self.router.prepare(deterministic=self._deterministic, tiles=tiles)
        gate_up, down = self.weights
        self._weights = None  # the experts hold what they need
        experts = None if make is None else make(gate_up, down, self._activation)
        self._experts = experts or SortedExperts(
            gate_up, down, self._activation, deterministic=self._deterministic, tiles=tiles
        )

    def targets(self, names: Collection[str], prefix: str) -> dict[str, torch.Tensor]:
        """Where a checkpoint's tensors belong, by their names below the layer `prefix`.

        `names` has all names of the checkpoint: with one tensor per expert, or stacked as transformers holds them.
        """
        gate_up, down = self.weights
        if prefix + "mlp.experts.gate_up_proj" in names:
            stacked = {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": down}
            return {"mlp.gate.weight": self.router.weight, **stacked}
        block, (gate_name, up_name, down_name) = self._config.block, self._config.parts
        found = {f"{block}.gate.weight": self.router.weight}
        for expert in range(self._config.experts):
            gate, up = gate_up[expert].chunk(2)
            for name, target in ((gate_name, gate), (up_name, up), (down_name, down[expert])):
                found[f"{block}.experts.{expert}.{name}.weight"] = target
        return found


class SortedExperts:
    """The reference: one product per expert that has tokens, sums in fp32 in the order of the experts.

    `deterministic`: a token's result does not depend on the tokens beside it.
    """

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        activation: str,
        *,
        deterministic: bool = False,
        tiles: dict[torch.Size, int] | None = None,
    ) -> None:
        tiles = {} if tiles is None else tiles
        self._gate_up = [Linear(weight) for weight in gate_up]
        self._down = [Linear(weight) for weight in down]
        for linear in (*self._gate_up, *self._down):
            linear.prepare(deterministic=deterministic, tiles=tiles)
        self._gated = partial(gated_by_row if deterministic else gated, activation=ACTIVATIONS[activation])

    def __call__(self, x: torch.Tensor, choice: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As Experts."""
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        flat = choice.flatten()
        order = flat.argsort(stable=True)
        rows, scales = order // choice.shape[1], weights.flatten()[order, None]
        start = 0
        for expert, count in enumerate(torch.bincount(flat, minlength=len(self._down)).tolist()):
            if count == 0:
                continue
            part = slice(start, start + count)
            mixed = self._down[expert](self._gated(self._gate_up[expert](x[rows[part]])))
            out[rows[part]] += mixed.float() * scales[part]  # a token chooses an expert once, so no row comes twice
            start += count
        return out.to(x.dtype)
