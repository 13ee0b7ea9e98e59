"""Models made on the spot: shapes of known ones with random weights, and a tiny one. Nothing is downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
SHAPES = {"llama-3-8b-shape": LLAMA_3_8B, "qwen3-0.6b-shape": QWEN3_06B}
SMALLER: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
"""What makes the same architectures small enough for a quick run on a CPU."""


def write_shape(folder: Path, name: str, *, quick: bool = False, **changes: Any) -> Path:
    """A model folder with a configuration only, for `--load-format dummy`."""
    made = folder / name
    made.mkdir(parents=True, exist_ok=True)
    (made / "config.json").write_text(json.dumps({**SHAPES[name], **(SMALLER if quick else {}), **changes}))
    return made


def write_tiny(folder: Path, vocab_size: int = 1024) -> Path:
    """A tiny Llama with random weights, saved by transformers. It has no tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(**{**SMALLER, "vocab_size": vocab_size}, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.15)  # so that logits differ clearly
    model.save_pretrained(folder)
    return folder


def operations_per_token(config: dict[str, Any]) -> float:
    """Multiplications and additions of the layers' matrix products for one token; neither attention nor the head."""
    return 2.0 * layer_parameters(config)


def layer_parameters(config: dict[str, Any]) -> int:
    """Of all layers' matrices, without embedding and head."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    attention = hidden * size * (2 * heads + 2 * config.get("num_key_value_heads", heads))
    return int(config["num_hidden_layers"] * (attention + 3 * hidden * config["intermediate_size"]))


def kv_bytes_per_token(config: dict[str, Any], item_bytes: int) -> int:
    """K and V of all layers."""
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    return int(2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * size * item_bytes)
