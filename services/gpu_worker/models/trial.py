"""A trial of someone else's model: a prompt in chunks gives what it gives at once. Leaves loading to the backend."""

from __future__ import annotations

import torch

from services.gpu_worker.attention.base import AttentionBackend
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.models.config import ModelConfig, UnsupportedModel
from services.gpu_worker.models.loading import Model

TOKENS = 8
CHUNKS = (3, 1, 4)
# Relative distance of logits: rounding alone stays far below, a lost state goes far beyond.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.1}


def check_history(model: Model, config: ModelConfig, device: torch.device) -> None:
    """Raises UnsupportedModel if anything but keys and values carries over from one step to the next."""
    shape = (config.num_layers, 1, TOKENS, config.kv_heads, config.head_dim, config.dtype, device)
    whole = _run(model, ReferenceAttention(KVCache(*shape)), (TOKENS,), device)
    chunked = _run(model, ReferenceAttention(KVCache(*shape)), CHUNKS, device)
    distance = float((whole - chunked).norm() / whole.norm().clamp_min(1e-30))
    if not distance <= TOLERANCE[config.dtype]:
        raise UnsupportedModel(
            f"{config.architecture} gives other logits in chunks than at once (relative distance {distance:.2g}): "
            "it keeps state outside keys and values"
        )


def _run(model: Model, attention: AttentionBackend, chunks: tuple[int, ...], device: torch.device) -> torch.Tensor:
    logits, start = [], 0
    with torch.inference_mode():
        for count in chunks:
            positions = torch.arange(start, start + count, device=device)
            batch = ForwardBatch(
                token_ids=positions + 1,
                positions=positions,
                qo_indptr=torch.tensor([0, count], dtype=torch.int32, device=device),
                kv_lengths=torch.tensor([start + count], dtype=torch.int32, device=device),
                page_tables=torch.zeros((1, 1), dtype=torch.int32, device=device),
                kv_slots=positions,
                logit_rows=torch.arange(count, device=device),
                num_decode_rows=0,
            )
            logits.append(model.forward(batch, attention))
            start += count
    return torch.cat(logits)
