"""Scales for K and V of 8 bits, as quantising tools leave them in checkpoints. Leaves their use to the cache."""

from __future__ import annotations

import re

from services.gpu_worker.models.checkpoint import Checkpoint
from services.gpu_worker.models.config import ModelError

_NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:attn\.|[kv]_proj\.)?(k|v|kv)_scale")


def is_kv_scale(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def read_kv_scales(checkpoint: Checkpoint, num_layers: int) -> tuple[tuple[float, float], ...]:
    """Per layer of K and V; what the checkpoint does not give is 1. Raises ModelError for a scale that is none.

    Without any: 1 keeps what most models have for K and V well inside of the format's range (2^-9 to 448), is the
    same on every worker and costs no run at the start.
    """
    scales = [[1.0, 1.0] for _ in range(num_layers)]
    for name in checkpoint.names():
        match = _NAME.fullmatch(name)
        if match is None or int(match[1]) >= num_layers:
            continue
        tensor = checkpoint.tensor(name)
        value = float(tensor.float().item()) if tensor.numel() == 1 else 0.0
        if not 0.0 < value < float("inf"):
            raise ModelError(f"{checkpoint.folder}: {name} is not a positive number")
        for index, of in enumerate("kv"):
            if of in match[2]:
                scales[int(match[1])][index] = value
    return tuple((k, v) for k, v in scales)
