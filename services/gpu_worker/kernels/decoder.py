"""All layers of a Llama-like decoder's step in one native call. Leaves embedding, last norm and head to the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.gpu_worker.attention.base import AttentionSpec
from services.gpu_worker.attention.native import NativeAttention
from services.gpu_worker.kernels.library import DTYPES, WEIGHT_FORMS, DecoderCall, DecoderLayer, Library
from services.gpu_worker.layers.packed_linear import PackedLinear


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: products packed (gate_up gated), norms as plain tensors."""

    qkv: PackedLinear  # q, k and v heads one after the other
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear
    input_norm: torch.Tensor  # [hidden]
    mlp_norm: torch.Tensor
    qk_norm: torch.Tensor | None  # [q_heads + kv_heads, head_dim]
    spec: AttentionSpec
    rope: bool = True


class NativeDecoder:
    """Runs the layers over a NativeAttention's cache; SiLU feed-forward, fp32 or bf16.

    As with its parts, a token's result does not depend on the rows beside it, the chunking or the threads.
    """

    def __init__(self, kernels: Library, layers: Sequence[LayerWeights], *, q_heads: int, eps: float) -> None:
        first = layers[0]
        self._layers = tuple(layers)  # keeps the memory alive
        self._run = kernels.functions.rf_decoder
        self._isa = kernels.isa_id
        self._dtype = first.qkv.dtype
        self._structs = (DecoderLayer * len(layers))(*(_layer(layer) for layer in layers))
        self._call = DecoderCall(
            layers=self._structs,
            eps=eps,
            num_layers=len(layers),
            hidden=first.qkv.inputs,
            intermediate=first.down.inputs,
            q_heads=q_heads,
            dtype=DTYPES[self._dtype],
            weights=WEIGHT_FORMS[first.qkv.form],
        )
        self._bound: NativeAttention | None = None

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, keep: torch.Tensor, attention: NativeAttention
    ) -> torch.Tensor:
        """x [T, hidden], contiguous, is overwritten; returns the last layer's tokens `keep` (int64 [L]), [L, hidden].

        cos and sin: fp32 [T, D / 2], strided alike. `attention` has this step's plan; K and V go to its cache.
        """
        call, hidden = self._call, self._call.hidden
        if not x.is_contiguous() or x.dtype != self._dtype or x.shape[1] != hidden:
            raise ValueError(f"x {tuple(x.shape)} of {x.dtype} does not fit")
        self._bind(attention)
        if cos.shape != (x.shape[0], call.head_dim // 2) or cos.stride() != sin.stride() or cos.stride(1) != 1:
            raise ValueError(f"rotary tables {tuple(cos.shape)} do not fit")
        if cos.dtype != torch.float32 or sin.dtype != torch.float32:
            raise ValueError("rotary tables are fp32")
        keep = keep.to(torch.int64).contiguous()
        if keep.numel() and not 0 <= int(keep.min()) <= int(keep.max()) < x.shape[0]:
            raise ValueError("a row to keep is not in the step")
        out = torch.empty((keep.shape[0], hidden), dtype=x.dtype)
        plan = attention.prepared(call.q_heads)
        if attention.planned_tokens != x.shape[0]:
            raise ValueError(f"the step has {attention.planned_tokens} tokens, x has {x.shape[0]}")
        call.x, call.out, call.keep = x.data_ptr(), out.data_ptr(), keep.data_ptr()
        call.cos, call.sin, call.table_stride = cos.data_ptr(), sin.data_ptr(), cos.stride(0)
        call.tokens, call.num_keep, call.threads = x.shape[0], keep.shape[0], torch.get_num_threads()
        if self._run(self._isa, plan, call):
            raise MemoryError("no memory for a decoder step")
        return out

    def _bind(self, attention: NativeAttention) -> None:
        """Takes the places of the layers' K and V, once per cache."""
        if attention is self._bound:
            return
        caches = attention.caches
        _, _, kv_heads, _, head_dim = caches[0].shape
        rows = (self._call.q_heads + 2 * kv_heads) * head_dim
        if len(caches) != len(self._layers) or caches[0].dtype != self._dtype:
            raise ValueError("the cache does not fit the decoder")
        for struct, cache, layer in zip(self._structs, caches, self._layers, strict=True):
            if layer.qkv.outputs != rows or layer.output.inputs != self._call.q_heads * head_dim:
                raise ValueError("the projections do not fit the cache's heads")
            struct.cache = cache.data_ptr()
        self._call.kv_heads, self._call.head_dim = kv_heads, head_dim
        self._bound = attention


def _layer(layer: LayerWeights) -> DecoderLayer:
    return DecoderLayer(
        input_norm=layer.input_norm.data_ptr(),
        mlp_norm=layer.mlp_norm.data_ptr(),
        qk_norm=None if layer.qk_norm is None else layer.qk_norm.data_ptr(),
        qkv=layer.qkv.packed,
        output=layer.output.packed,
        gate_up=layer.gate_up.packed,
        down=layer.down.packed,
        qkv_bias=layer.qkv.packed_bias,
        output_bias=layer.output.packed_bias,
        gate_up_bias=layer.gate_up.packed_bias,
        down_bias=layer.down.packed_bias,
        scale=layer.spec.scale,
        soft_cap=layer.spec.soft_cap,
        window=layer.spec.sliding_window,
        rope=layer.rope,
    )
