"""Seeded random weights for load_format "dummy": speed and protocol trials without a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from services.gpu_worker.models.decoder import Decoder

STANDARD_DEVIATION = 0.02


def fill_random(decoder: Decoder, targets: Mapping[str, torch.Tensor], seed: int = 0) -> None:
    """Norm weights become ones, all else normal. Each tensor has its own stream, so order does not matter.

    A rank draws whole tensors and keeps its part: all ranks together are the same model as one alone. A GPU draws them
    itself, which takes a second where a CPU takes a minute; they are others than a CPU's.
    """
    for name, target in targets.items():
        if name.endswith("norm.weight"):
            target.fill_(1.0)
            continue
        device = target.device
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()) ^ seed)
        shape = decoder.whole_shape(name, target)
        whole = torch.randn(shape, generator=generator, device=device).mul_(STANDARD_DEVIATION)
        target.copy_(decoder.part(name, whole))
