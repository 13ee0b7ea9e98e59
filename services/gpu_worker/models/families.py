"""The Llama-like architectures the own decoder runs, each as a reading of its config.json.

Leaves weights to `decoder` and everything outside these families to `transformers_backend`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from services.gpu_worker.layers.activation import ACTIVATIONS
from services.gpu_worker.layers.moe import MoeConfig
from services.gpu_worker.layers.rotary import RopeConfig
from services.gpu_worker.models.config import UnsupportedModel, required

ROPE_KINDS = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3"})
ROPE_WITH_ORIGINAL = frozenset({"yarn", "longrope", "llama3"})


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Everything that tells one Llama-like decoder from another."""

    vocab_size: int
    hidden: int
    intermediate: int
    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    windows: tuple[int, ...]  # per layer; 0: full attention
    rope_layers: tuple[bool, ...]  # per layer; False: no position at all
    rope: RopeConfig
    native_context: int
    moe: MoeConfig | None = None  # None: every layer is dense


@dataclass(frozen=True, slots=True)
class Family:
    """Where an architecture departs from Llama, and its defaults for keys a config.json may omit."""

    qkv_bias: bool | None = None  # None: the configuration's attention_bias
    output_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    tied: bool = False
    kv_heads: int | None = None  # None: as many as query heads
    head_dim: int | None = None  # None: hidden / heads
    theta: float = 10_000.0
    max_positions: int = 32_768
    windows: Callable[[dict[str, Any], int], tuple[int, ...]] = lambda _config, layers: (0,) * layers
    rope_layers: Callable[[dict[str, Any], int], tuple[bool, ...]] = lambda _config, layers: (True,) * layers
    moe: Callable[[dict[str, Any], int], MoeConfig | None] = lambda _config, _layers: None


def _mistral_windows(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    return (int(config.get("sliding_window", 4096) or 0),) * layers


def _qwen_window(config: dict[str, Any]) -> int:
    return int(config.get("sliding_window", 4096) or 0) if config.get("use_sliding_window") else 0


def _qwen_windows(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    window = _qwen_window(config)
    first = int(config.get("max_window_layers", 28))
    kinds = config.get("layer_types") or [
        "sliding_attention" if layer >= first else "full_attention" for layer in range(layers)
    ]
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _smollm3_rope_layers(config: dict[str, Any], layers: int) -> tuple[bool, ...]:
    flags = config.get("no_rope_layers")
    if flags is None:
        interval = int(config.get("no_rope_layer_interval", 4))
        flags = [(layer + 1) % interval != 0 for layer in range(layers)]
    return tuple(bool(flag) for flag in flags)


def _smollm3_windows(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    window = int(config.get("sliding_window") or 0) if config.get("use_sliding_window") else 0
    kinds = config.get("layer_types") or [
        "full_attention" if has_rope else "sliding_attention" for has_rope in _smollm3_rope_layers(config, layers)
    ]
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def _qwen3_moe_windows(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    return (_qwen_window(config),) * layers


def _mixtral_windows(config: dict[str, Any], layers: int) -> tuple[int, ...]:
    return (int(config.get("sliding_window") or 0),) * layers


def _mixtral_moe(config: dict[str, Any], layers: int) -> MoeConfig:
    return MoeConfig(
        experts=int(config.get("num_local_experts") or config.get("num_experts") or 8),
        top_k=int(config.get("num_experts_per_tok") or 2),
        intermediate=int(required(config, "intermediate_size")),
        normalised=True,
        layers=(True,) * layers,
        block="block_sparse_moe",
        parts=("w1", "w3", "w2"),
    )


def _qwen_moe(config: dict[str, Any], layers: int) -> MoeConfig | None:
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 128)
    step, dense = int(config.get("decoder_sparse_step") or 1), set(config.get("mlp_only_layers") or ())
    sparse = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    if not any(sparse):
        return None
    return MoeConfig(
        experts=experts,
        top_k=int(config.get("num_experts_per_tok") or 8),
        intermediate=int(config.get("moe_intermediate_size") or 768),
        normalised=bool(config.get("norm_topk_prob", False)),
        layers=sparse,
        block="mlp",
        parts=("gate_proj", "up_proj", "down_proj"),
    )


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias=None, max_positions=2048),
    "MistralForCausalLM": Family(
        qkv_bias=False, output_bias=False, kv_heads=8, max_positions=131_072, windows=_mistral_windows
    ),
    "Qwen2ForCausalLM": Family(qkv_bias=True, output_bias=False, kv_heads=32, windows=_qwen_windows),
    "Qwen3ForCausalLM": Family(qk_norm=True, kv_heads=32, head_dim=128, windows=_qwen_windows),
    "MixtralForCausalLM": Family(
        qkv_bias=False,
        output_bias=False,
        kv_heads=8,
        theta=1_000_000.0,
        max_positions=131_072,
        windows=_mixtral_windows,
        moe=_mixtral_moe,
    ),
    "Qwen3MoeForCausalLM": Family(qk_norm=True, kv_heads=4, windows=_qwen3_moe_windows, moe=_qwen_moe),
    "SmolLM3ForCausalLM": Family(
        mlp_bias=None,
        tied=True,
        kv_heads=4,
        theta=2_000_000.0,
        windows=_smollm3_windows,
        rope_layers=_smollm3_rope_layers,
    ),
}


def read_decoder_config(architecture: str, config: dict[str, Any]) -> DecoderConfig:
    """Raises UnsupportedModel for what the own decoder cannot run, ModelError for a broken config.json."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise UnsupportedModel(f"architecture {architecture!r} is not of the own decoder's family")
    layers, heads = int(required(config, "num_hidden_layers")), int(required(config, "num_attention_heads"))
    hidden = int(required(config, "hidden_size"))
    head_dim = int(config.get("head_dim") or family.head_dim or hidden // heads)
    activation = str(config.get("hidden_act", "silu"))
    if activation not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {activation!r} is not known to the own decoder")
    attention_bias = bool(config.get("attention_bias", False))
    rope = _read_rope(config, family, head_dim)
    decoder = DecoderConfig(
        vocab_size=int(required(config, "vocab_size")),
        hidden=hidden,
        intermediate=int(required(config, "intermediate_size")),
        num_layers=layers,
        num_heads=heads,
        kv_heads=_kv_heads(config, family, heads),
        head_dim=head_dim,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        activation=activation,
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=attention_bias if family.output_bias is None else family.output_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        windows=family.windows(config, layers),
        rope_layers=family.rope_layers(config, layers),
        rope=rope,
        native_context=_native_context(rope),
        moe=family.moe(config, layers),
    )
    _check(decoder)
    return decoder


def _kv_heads(config: dict[str, Any], family: Family, heads: int) -> int:
    if "num_key_value_heads" in config:
        return int(config["num_key_value_heads"] or heads)
    return family.kv_heads or heads


def _read_rope(config: dict[str, Any], family: Family, head_dim: int) -> RopeConfig:
    parameters = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedModel("rope parameters differ between layer types")
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    partial = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if kind not in ROPE_KINDS or partial != 1.0:
        raise UnsupportedModel(f"rope kind {kind!r} with partial factor {partial} is not known to the own decoder")
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or family.theta)
    positions = int(config.get("max_position_embeddings") or family.max_positions)
    if kind in ROPE_WITH_ORIGINAL:
        original = config.get("original_max_position_embeddings")
        if original is not None:
            parameters["original_max_position_embeddings"] = original
        parameters.setdefault("original_max_position_embeddings", positions)
    parameters["rope_type"] = kind
    return RopeConfig(kind, theta, head_dim, positions, parameters if kind != "default" else {})


def _native_context(rope: RopeConfig) -> int:
    """Yarn configurations often keep the unstretched length in max_position_embeddings."""
    if rope.kind != "yarn" or not rope.parameters.get("factor"):
        return rope.max_position_embeddings
    original = int(rope.parameters["original_max_position_embeddings"])
    return max(rope.max_position_embeddings, int(original * float(rope.parameters["factor"])))


def _check(decoder: DecoderConfig) -> None:
    if decoder.num_heads % decoder.kv_heads:
        raise UnsupportedModel(f"{decoder.num_heads} query heads do not divide into {decoder.kv_heads} key heads")
    if decoder.head_dim % 2:
        raise UnsupportedModel(f"head_dim {decoder.head_dim} is odd")
    if decoder.moe is not None and not 0 < decoder.moe.top_k <= decoder.moe.experts:
        raise UnsupportedModel(f"{decoder.moe.top_k} of {decoder.moe.experts} experts cannot be chosen per token")
    for name, values in (("windows", decoder.windows), ("rope layers", decoder.rope_layers)):
        if len(values) < decoder.num_layers:
            raise UnsupportedModel(f"config.json gives {name} for {len(values)} of {decoder.num_layers} layers")
