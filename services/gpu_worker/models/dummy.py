"""Seeded random weights for load_format "dummy": speed and protocol trials without a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch

STANDARD_DEVIATION = 0.02


def fill_random(targets: Mapping[str, torch.Tensor], seed: int = 0) -> None:
    """Norm weights become ones, all else normal. Each tensor has its own stream, so order does not matter."""
    for name, target in targets.items():
        if name.endswith("norm.weight"):
            target.fill_(1.0)
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ seed)
        target.copy_(torch.randn(target.shape, generator=generator).mul_(STANDARD_DEVIATION))
