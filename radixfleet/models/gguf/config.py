"""GGUF metadata -> config.json and generation_config.json; leaves weights and tokens to their modules."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from radixfleet.models.errors import ModelError
from radixfleet.models.gguf.metadata import Metadata

# Mistral's files carry the llama architecture: the computation is the same.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
# Texts of tokens that end a turn or a document in the model families this converter knows.
_END_TEXTS = frozenset({"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end_of_text|>", "<|endoftext|>", "</s>"})
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_CONTROL = 3

FloatArray = npt.NDArray[np.float32]


def build_config(
    meta: Metadata, vocab_size: int, tied: bool, biased: bool, rope_factors: FloatArray | None
) -> dict[str, Any]:
    """config.json. `tied`: no output matrix; `biased`: q/k/v have biases. Raises ModelError if unsupported."""
    if meta.arch not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"GGUF files of the architecture {meta.arch!r} are not supported (only {known})")
    if meta.arch_get("expert_count", 0):
        raise ModelError("GGUF files of mixture-of-experts models are not supported")
    class_name, model_type = ARCHITECTURES[meta.arch]
    heads = int(meta.arch_require("attention.head_count"))
    hidden = int(meta.arch_require("embedding_length"))
    head_dim = int(meta.arch_get("attention.key_length", hidden // heads))
    if int(meta.arch_get("rope.dimension_count", head_dim)) != head_dim:
        raise ModelError("GGUF files with partial rotary embeddings are not supported")
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": int(meta.arch_require("feed_forward_length")),
        "num_hidden_layers": int(meta.arch_require("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(meta.arch_get("attention.head_count_kv", heads)),
        "head_dim": head_dim,
        "max_position_embeddings": int(meta.arch_require("context_length")),
        "rms_norm_eps": _short(meta.arch_require("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(meta.arch_get("rope.freq_base", 10000.0)),
        "vocab_size": vocab_size,
        "tie_word_embeddings": tied,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
    }
    if model_type == "llama":
        config["attention_bias"] = biased
        config["mlp_bias"] = False
    scaling = _rope_scaling(meta, head_dim, float(config["rope_theta"]), rope_factors)
    if scaling:
        config["rope_scaling"] = scaling
    for key, name in (("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id")):
        value = meta.get(f"tokenizer.ggml.{key}")
        if value is not None:
            config[name] = int(value)
    return config


def build_generation_config(meta: Metadata) -> dict[str, Any]:
    """generation_config.json: every token that ends an answer is an end token."""
    config: dict[str, Any] = {"eos_token_id": end_token_ids(meta)}
    for key in ("bos", "padding"):
        value = meta.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            config["pad_token_id" if key == "padding" else "bos_token_id"] = int(value)
    return config


def end_token_ids(meta: Metadata) -> list[int]:
    """The declared end tokens first, then control tokens whose text is a known end."""
    declared = [meta.get(f"tokenizer.ggml.{key}") for key in _END_KEYS]
    ids = [int(value) for value in declared if value is not None]
    tokens = meta.require("tokenizer.ggml.tokens")
    types = meta.get("tokenizer.ggml.token_type") or []
    ids += [i for i, kind in enumerate(types) if kind == _CONTROL and tokens[i] in _END_TEXTS]
    return list(dict.fromkeys(ids))


def _short(value: float) -> float:
    """The decimal number somebody wrote before it became a float32."""
    return float(str(np.float32(value)))


def _rope_scaling(meta: Metadata, head_dim: int, theta: float, factors: FloatArray | None) -> dict[str, Any] | None:
    if factors is not None:
        return _llama3_scaling(meta, head_dim, theta, factors)
    kind = meta.arch_get("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _short(meta.arch_require("rope.scaling.factor"))}
    original = meta.arch_get("rope.scaling.original_context_length")
    if kind == "yarn" and original:
        scaling["original_max_position_embeddings"] = int(original)
    if kind not in ("linear", "yarn"):
        raise ModelError(f"rope scaling {kind!r} of GGUF files is not supported")
    return scaling


def _llama3_scaling(meta: Metadata, head_dim: int, theta: float, factors: FloatArray) -> dict[str, Any]:
    """The file holds one divisor per frequency; the four numbers behind them are found and proven equal."""
    original = int(meta.arch_get("rope.scaling.original_context_length", 8192))
    factor = float(factors.max())
    exponents: FloatArray = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelength: FloatArray = np.float32(2 * np.pi) * np.power(np.float32(theta), exponents)
    smooth = np.clip((original / wavelength - 1.0) / 3.0, 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if not np.allclose(expected, factors, rtol=1e-3):
        raise ModelError("the rope factors of this GGUF file follow no known rule")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": original,
    }
