"""Architectures outside the own family: transformers' implementation over our paged attention.

Code from a model folder is never run. Leaves attention to `transformers_attention`.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.gpu_worker.attention.base import AttentionBackend, AttentionSpec
from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.kernels.logits import Blocks
from services.gpu_worker.models.checkpoint import Checkpoint, digest
from services.gpu_worker.models.config import ModelConfig, ModelError, ModelFolder, UnsupportedModel, limit_context
from services.gpu_worker.models.loading import LoadOptions, choose_dtype
from services.gpu_worker.models.transformers_attention import (
    PROBE_TOKENS,
    AttentionBridge,
    AttentionProbe,
    LayerShape,
)
from services.gpu_worker.models.trial import check_history

LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


class TransformersModel:
    """A causal language model of transformers behind the forward pass of ours."""

    blocks: Blocks | None = None  # its product notes nothing

    def __init__(
        self, model: Any, bridge: AttentionBridge, specs: tuple[AttentionSpec, ...], *, token_by_token: bool
    ) -> None:
        self._model = model
        self._bridge = bridge
        self._specs = specs
        self._token_by_token = token_by_token

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """fp32 logits [len(batch.logit_rows), vocab]."""
        self._bridge.bind(attention, self._specs)
        if self._token_by_token:
            return self._forward_token_by_token(batch, attention)
        attention.plan(batch)
        return self._run(batch.token_ids, batch.positions, batch.logit_rows)

    def _forward_token_by_token(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """The only sums of someone else's code that cannot depend on other rows are those of a single row."""
        row_of = torch.repeat_interleave(
            torch.arange(batch.num_rows, device=batch.qo_indptr.device), batch.qo_indptr.diff()
        )
        every = torch.zeros(1, dtype=torch.int64, device=batch.token_ids.device)
        logits = []
        for token in range(batch.num_tokens):
            single = _single_token(batch, token, int(row_of[token]))
            attention.plan(single)
            logits.append(self._run(single.token_ids, single.positions, every))
        return torch.cat(logits)[batch.logit_rows]

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor) -> torch.Tensor:
        output = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            return_dict=True,
        )
        logits: torch.Tensor = output.logits[0].float()
        return logits


def load_transformers(folder: ModelFolder, options: LoadOptions) -> tuple[ModelConfig, TransformersModel]:
    """Raises UnsupportedModel for models whose attention or state our cache cannot hold, ModelError for bad weights."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    checkpoint = None if options.load_format == "dummy" else Checkpoint(folder.path)
    dtype = choose_dtype(folder, checkpoint, options)
    bridge, probe = AttentionBridge(), AttentionProbe()
    model = _build(folder, dtype, probe.name, dummy=checkpoint is None)
    model = model.to(options.device).eval().requires_grad_(False)
    text = model.config.get_text_config(decoder=True)
    _refuse_foreign_state(model, text)
    context = limit_context(_native_context(text), options.context_length, extendable=_is_dynamic(model))
    _pin_rope(model, context)
    vocab_size = _probe(model, options.device)
    layers = probe.layers(int(text.num_hidden_layers))
    model.set_attn_implementation(bridge.name)
    specs = tuple(layer.spec for layer in layers)
    config = ModelConfig(
        architecture=folder.architecture or type(model).__name__,
        model_type=folder.model_type,
        implementation="transformers",
        digest=digest(folder.config, checkpoint),
        dtype=dtype,
        vocab_size=vocab_size,
        hidden=int(text.hidden_size),
        num_layers=len(layers),
        **_head_shape(layers),
        max_context=context,
        eos_ids=folder.eos_ids(),
        attention=specs,
        deterministic=options.deterministic,
        kv_scales=(),
    )
    served = TransformersModel(model, bridge, specs, token_by_token=options.deterministic)
    check_history(served, config, options.device)
    return config, served


def _build(folder: ModelFolder, dtype: torch.dtype, attention: str, *, dummy: bool) -> Any:
    try:
        config = transformers.AutoConfig.from_pretrained(folder.path, trust_remote_code=False, local_files_only=True)
        if dummy:
            with torch.random.fork_rng():
                torch.manual_seed(0)
                return transformers.AutoModelForCausalLM.from_config(
                    config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
                )
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder.path,
            config=config,
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except KeyError as error:  # an older table of attention classes
        raise UnsupportedModel(f"{folder.architecture} does not take an attention function") from error
    except (ValueError, OSError, ImportError) as error:
        raise UnsupportedModel(f"{folder.path}: transformers cannot load it: {error}") from error
    model, info = loaded
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(kind):
            raise ModelError(f"{folder.path}: {kind.replace('_keys', '')} tensors: {sorted(map(str, info[kind]))[:8]}")
    return model


def _refuse_foreign_state(model: Any, text: Any) -> None:
    name = type(model).__name__
    if not model._supports_attention_backend:
        raise UnsupportedModel(f"{name} does not take an attention function")
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModel(f"{name} keeps state outside keys and values")
    if getattr(text, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name} has an encoder")
    if getattr(text, "num_kv_shared_layers", 0):
        raise UnsupportedModel(f"{name} shares keys and values between layers")
    accepted = inspect.signature(model.forward).parameters
    for parameter in ("position_ids", "logits_to_keep"):
        if parameter not in accepted:
            raise UnsupportedModel(f"{name} does not take {parameter}")


def _native_context(text: Any) -> int:
    positions = getattr(text, "max_position_embeddings", None)
    if not positions:
        raise UnsupportedModel("the configuration names no max_position_embeddings")
    return int(positions)


def _is_dynamic(model: Any) -> bool:
    return any(getattr(module, "rope_type", None) == "dynamic" for module in model.modules())


def _pin_rope(model: Any, max_context: int) -> None:
    """Fix frequencies that would follow the longest row of a step: shared keys need one rotation per position."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict) and LENGTH_DEPENDENT_ROPE.intersection(kind.values()):
            raise UnsupportedModel("rope per layer type that depends on the length")
        if not isinstance(kind, str) or kind not in LENGTH_DEPENDENT_ROPE:
            continue
        device = module.inv_freq.device
        frequencies, module.attention_scaling = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=max_context)
        module.inv_freq.copy_(frequencies)
        module.original_inv_freq = frequencies.clone()
        module.long_inv_freq = frequencies.clone()
        module.max_seq_len_cached = max(max_context, module.max_seq_len_cached)
        module.original_max_seq_len = 0


def _probe(model: Any, device: torch.device) -> int:
    """One small pass that shows what every layer's attention asks for; returns the logits' width."""
    tokens = torch.arange(PROBE_TOKENS, device=device)[None]
    with torch.inference_mode():
        output = model(
            input_ids=tokens, position_ids=tokens, use_cache=False, logits_to_keep=tokens[0, -1:], return_dict=True
        )
    if output.logits.shape[:2] != (1, 1):
        raise UnsupportedModel(f"logits_to_keep is not honoured: logits of shape {tuple(output.logits.shape)}")
    return int(output.logits.shape[-1])


def _head_shape(layers: list[LayerShape]) -> dict[str, int]:
    return {"num_heads": layers[0].heads, "kv_heads": layers[0].kv_heads, "head_dim": layers[0].dim}


def _single_token(batch: ForwardBatch, token: int, row: int) -> ForwardBatch:
    """Token `token` of row `row` as a batch of its own; earlier tokens of the row are in the cache by then."""
    here = slice(token, token + 1)
    return ForwardBatch(
        token_ids=batch.token_ids[here],
        positions=batch.positions[here],
        qo_indptr=torch.tensor([0, 1], dtype=torch.int32, device=batch.qo_indptr.device),
        kv_lengths=(batch.positions[here] + 1).to(torch.int32),
        page_tables=batch.page_tables[row : row + 1],
        kv_slots=batch.kv_slots[here],
        logit_rows=batch.logit_rows[:0],
        num_decode_rows=1,
    )
