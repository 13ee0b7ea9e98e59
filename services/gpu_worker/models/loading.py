"""Puts weights into the own decoder, and holds what both implementations share. Leaves the cache to the runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, get_args

import torch

from services.gpu_worker.attention.base import AttentionBackend
from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.kernels.library import Library
from services.gpu_worker.kernels.logits import Blocks
from services.gpu_worker.layers.moe import ExpertsMaker
from services.gpu_worker.layers.moe_fused import MoeBackend, experts_maker
from services.gpu_worker.layers.quantized import CannotQuantize, QuantizedForm, Quantizer
from services.gpu_worker.models.checkpoint import Checkpoint, check_names, copy_weights, digest
from services.gpu_worker.models.config import ModelConfig, ModelError, ModelFolder, limit_context
from services.gpu_worker.models.decoder import Decoder, attention_spec
from services.gpu_worker.models.dummy import fill_random
from services.gpu_worker.models.families import DecoderConfig
from services.gpu_worker.models.kv_scales import read_kv_scales
from services.gpu_worker.models.native_step import native_kernels
from services.gpu_worker.models.progress import LoadProgress
from services.gpu_worker.parallel.group import TensorGroup

LoadFormat = Literal["auto", "safetensors", "dummy"]
Quantization = Literal["none", "int8", "fp8", "int4"]


class Model(Protocol):
    """Weights with a forward pass that plans and calls the given attention."""

    blocks: Blocks | None
    """What the product that made the last forward's logits has noted of them."""

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """fp32 logits [len(batch.logit_rows), vocab]."""
        ...


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load, whatever the implementation."""

    device: torch.device
    dtype: torch.dtype | None  # None: the folder's
    load_format: LoadFormat
    context_length: int  # 0: the model's
    deterministic: bool
    native: bool = False  # whether attention will be native, which the own decoder's kernels need
    quantization: Quantization = "none"
    group: TensorGroup | None = None  # the ranks to share the weights with
    moe_backend: MoeBackend = "auto"


def load_own(folder: ModelFolder, decoder: DecoderConfig, options: LoadOptions) -> tuple[ModelConfig, Model]:
    """The own decoder with its weights in place. Raises ModelError for weights that do not fit."""
    checkpoint = None if options.load_format == "dummy" else Checkpoint(folder.path)
    dtype = choose_dtype(folder, checkpoint, options)
    context = limit_context(decoder.native_context, options.context_length, extendable=decoder.rope.kind == "dynamic")
    model = Decoder(
        decoder,
        dtype,
        options.device,
        max_context=context,
        deterministic=options.deterministic,
        group=options.group,
        quantize=_quantizer(decoder, dtype, options),
    )
    try:
        _fill(model, checkpoint)
    except CannotQuantize as error:
        raise ModelError(f"{folder.path}: {error}") from error
    kernels = _kernels(decoder, dtype, options)
    int8 = options.quantization == "int8"
    if int8 and kernels is None:
        raise ModelError(
            "--quantization int8 needs the CPU kernels: native attention on a CPU, bfloat16 or float32, one rank"
        )
    if options.group is not None and not options.deterministic:
        options.group.fuse(decoder.hidden, dtype, options.device)
    model.finish_loading(kernels, int8=int8, make_experts=_experts_maker(decoder, dtype, options))
    config = ModelConfig(
        architecture=folder.architecture,
        model_type=folder.model_type,
        implementation="own",
        digest=digest(folder.config, checkpoint) + _suffix(options.quantization),
        dtype=dtype,
        vocab_size=decoder.vocab_size,
        hidden=decoder.hidden,
        num_layers=decoder.num_layers,
        num_heads=model.own.num_heads,
        kv_heads=model.own.kv_heads,
        head_dim=decoder.head_dim,
        max_context=context,
        eos_ids=folder.eos_ids(),
        attention=tuple(attention_spec(decoder, layer) for layer in range(decoder.num_layers)),
        deterministic=options.deterministic,
        kv_scales=() if checkpoint is None else read_kv_scales(checkpoint, decoder.num_layers),
    )
    return config, model


def _suffix(quantization: Quantization) -> str:
    return "" if quantization == "none" else f"-{quantization}"


def _kernels(decoder: DecoderConfig, dtype: torch.dtype, options: LoadOptions) -> Library | None:
    """Those of the CPU. They run all layers in one call, with no room for the sums over ranks or other products."""
    if not options.native or options.group is not None or options.quantization in get_args(QuantizedForm):
        return None
    return native_kernels(decoder, dtype, options.device)


def _quantizer(decoder: DecoderConfig, dtype: torch.dtype, options: LoadOptions) -> Quantizer | None:
    """Raises ModelError where there is no kernel for what is asked for."""
    if options.quantization == "none" or options.quantization == "int8":
        return None
    if decoder.moe is not None:
        raise ModelError(f"--quantization {options.quantization} is not for models with experts")
    try:
        return Quantizer(options.quantization, options.device, dtype)
    except CannotQuantize as error:
        raise ModelError(str(error)) from error


def _fill(model: Decoder, checkpoint: Checkpoint | None) -> None:
    if checkpoint is None:
        model.load(partial(fill_random, model))
        return
    names = set(checkpoint.names())
    check_names(checkpoint, model.targets(names), model.ignorable)
    progress = LoadProgress(len(names))

    def copy(targets: Mapping[str, torch.Tensor]) -> None:
        copy_weights(checkpoint, targets, model.part)
        progress.add(len(targets))

    model.load(copy, names)


def _experts_maker(decoder: DecoderConfig, dtype: torch.dtype, options: LoadOptions) -> ExpertsMaker | None:
    if decoder.moe is None or options.deterministic:
        return None  # the reference's sums alone do not depend on the rows beside a token
    try:
        return experts_maker(options.moe_backend, options.device, dtype, decoder.moe.top_k)
    except ValueError as error:
        raise ModelError(str(error)) from error


def choose_dtype(folder: ModelFolder, checkpoint: Checkpoint | None, options: LoadOptions) -> torch.dtype:
    """The wished dtype, else the one config.json declares, else the one the weights are stored in."""
    declared = options.dtype or folder.declared_dtype()
    if declared is None and checkpoint is not None:
        declared = checkpoint.floating_dtype()
    return declared or torch.float32
