"""Rotary position embedding (Su et al., 2021) in fp32; scaled variants take transformers' frequencies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """What the frequencies depend on; `parameters` is the scaling as transformers' configurations hold it."""

    kind: str  # "default", "linear", "dynamic", "yarn", "longrope", "llama3"
    theta: float
    head_dim: int
    max_position_embeddings: int
    parameters: dict[str, Any] = field(default_factory=dict)


class _ScalingView:
    """The few attributes transformers' frequency functions read from a model configuration."""

    def __init__(self, rope: RopeConfig) -> None:
        self.rope_parameters = {**rope.parameters, "rope_theta": rope.theta}
        self.head_dim = rope.head_dim
        self.hidden_size = rope.head_dim
        self.num_attention_heads = 1
        self.max_position_embeddings = rope.max_position_embeddings

    def standardize_rope_params(self) -> None:
        """The family has done it already."""


def inverse_frequencies(rope: RopeConfig, max_context: int) -> tuple[torch.Tensor, float]:
    """Frequencies fp32 [head_dim / 2] and the factor for cos and sin.

    Kinds that change with the sequence's length (dynamic, longrope) are fixed at the served context:
    cached keys are shared between sequences, so one position must mean one rotation.
    """
    if rope.kind == "default":
        exponents = torch.arange(0, rope.head_dim, 2, dtype=torch.float32) / rope.head_dim
        return 1.0 / (rope.theta**exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # seconds of import

    frequencies, factor = ROPE_INIT_FUNCTIONS[rope.kind](
        _ScalingView(rope), torch.device("cpu"), seq_len=max_context, layer_type=None
    )
    return frequencies.float(), float(factor)


class Rotary:
    """Computes cos and sin of a step's positions once, for all layers."""

    def __init__(self, rope: RopeConfig, max_context: int, device: torch.device, *, deterministic: bool) -> None:
        frequencies, self._factor = inverse_frequencies(rope, max_context)
        self._frequencies = frequencies.to(device)
        self._deterministic = deterministic

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [T] -> cos and signed sin, fp32 [T, 1, head_dim] each, as `rotate` takes them."""
        cos, sin = self.halves(positions)
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)

    def halves(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [T] -> cos and sin, fp32 [T, head_dim / 2] each."""
        if self._deterministic and positions.shape[0] > 1:
            # Vector kernels round a tail differently, and where a tail falls depends on T.
            rows = [self.together(position) for position in positions.split(1)]
            return torch.cat([cos for cos, _ in rows]), torch.cat([sin for _, sin in rows])
        return self.together(positions)

    def together(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `halves`, for who computes each position once."""
        angles = positions[:, None].float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._factor != 1.0:
            cos, sin = cos * self._factor, sin * self._factor
        return cos, sin


class RotaryTables:
    """cos and sin of the first `rows` positions, fp32 [rows, head_dim / 2] each, for kernels that look them up."""

    FIRST_ROWS = 4096

    def __init__(self, rotary: Rotary, max_context: int) -> None:
        self._rotary = rotary
        self._max_context = max_context
        self.cos, self.sin = rotary.together(torch.arange(min(self.FIRST_ROWS, max_context)))

    @property
    def rows(self) -> int:
        return self.cos.shape[0]

    def grow(self) -> bool:
        """Make room for twice as many positions; False where that is beyond the longest context."""
        rows = min(2 * self.rows, self._max_context)
        if rows == self.rows:
            return False
        added = self._rotary.together(torch.arange(self.rows, rows))
        self.cos, self.sin = torch.cat((self.cos, added[0])), torch.cat((self.sin, added[1]))
        return True


def rotate(x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate x [T, heads, head_dim]; the two halves of a head are its pairs. The result has x's dtype."""
    cos, signed_sin = tables
    half = x.shape[-1] // 2
    turned = torch.cat((x[..., half:], x[..., :half]), -1)
    return (x * cos + turned * signed_sin).to(x.dtype)
