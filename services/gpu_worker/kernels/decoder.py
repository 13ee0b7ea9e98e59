"""A Llama-like decoder's step in one native call, with its head if wanted. Leaves what the head is to the model."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.gpu_worker.attention.base import AttentionSpec
from services.gpu_worker.attention.native import NativeAttention, contiguous
from services.gpu_worker.kernels.library import DTYPES, WEIGHT_FORMS, DecoderCall, DecoderLayer, Library, LinearCall
from services.gpu_worker.layers.packed_linear import PackedLinear
from services.gpu_worker.layers.rotary import RotaryTables

# StepError of interface.h
NO_MEMORY, BEYOND_TABLES = -1, 2
_ERRORS = {
    1: "a token is not in the vocabulary",
    2: "a position is beyond the context",
    3: "a row to keep is not in the step",
}


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
    """Embedding and layers over a NativeAttention's cache; SiLU feed-forward, fp32 or bf16.

    As with its parts, a token's result does not depend on the rows beside it, the chunking or the threads.
    """

    def __init__(
        self,
        kernels: Library,
        layers: Sequence[LayerWeights],
        embedding: torch.Tensor,
        tables: RotaryTables,
        *,
        q_heads: int,
        eps: float,
    ) -> None:
        """embedding [vocab, hidden], contiguous."""
        first = layers[0]
        if not embedding.is_contiguous() or embedding.dtype != first.qkv.dtype:
            raise ValueError(f"embeddings of {embedding.dtype} do not fit")
        self._layers = tuple(layers)  # keeps the memory alive
        self._embedding, self._tables = embedding, tables
        self._run = kernels.functions.rf_decoder
        self._isa = kernels.isa_id
        self._structs = (DecoderLayer * len(layers))(*(_layer(layer) for layer in layers))
        self._call = DecoderCall(
            layers=self._structs,
            embedding=embedding.data_ptr(),
            eps=eps,
            vocab=embedding.shape[0],
            num_layers=len(layers),
            hidden=embedding.shape[1],
            intermediate=first.down.inputs,
            q_heads=q_heads,
            dtype=DTYPES[embedding.dtype],
            weights=WEIGHT_FORMS[first.qkv.form],
        )
        self._take_tables()
        self._bound: NativeAttention | None = None

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        keep: torch.Tensor,
        attention: NativeAttention,
        *,
        out: torch.Tensor | None = None,
        head: LinearCall | None = None,
    ) -> torch.Tensor:
        """token_ids and positions int64 [T] -> what the layers make of the tokens `keep` (int64 [L]), [L, hidden].

        `attention` has this step's plan; K and V go to its cache. `head`: is run then, over memory that is `out`.
        """
        call = self._call
        self._bind(attention)
        plan, tokens = attention.prepared(call.q_heads), token_ids.shape[0]
        if out is None:
            out = torch.empty((keep.shape[0], call.hidden), dtype=self._embedding.dtype)
        if not attention.planned_tokens == tokens == positions.shape[0] or len(out) != len(keep):
            raise ValueError(f"the step has {attention.planned_tokens} tokens, not {tokens} and {positions.shape[0]}")
        if head is not None:
            head.threads = torch.get_num_threads()
            if head.rows != len(keep) or head.x != out.data_ptr() or head.weights != call.weights:
                raise ValueError("the head is for other memory, rows or weights")
        columns = [contiguous(ids, torch.int64) for ids in (token_ids, positions, keep)]
        call.token_ids, call.positions, call.keep = (column.data_ptr() for column in columns)
        call.tokens, call.num_keep, call.out = tokens, keep.shape[0], out.data_ptr()
        call.threads, call.head = torch.get_num_threads(), None if head is None else ctypes.pointer(head)
        while wrong := self._run(self._isa, plan, call):
            if wrong != BEYOND_TABLES or not self._tables.grow():
                raise MemoryError("no memory for a decoder step") if wrong == NO_MEMORY else ValueError(_ERRORS[wrong])
            self._take_tables()
        return out

    def _take_tables(self) -> None:
        tables, call = self._tables, self._call
        call.cos, call.sin, call.table_rows = tables.cos.data_ptr(), tables.sin.data_ptr(), tables.rows

    def _bind(self, attention: NativeAttention) -> None:
        """Takes the places of the layers' K and V, once per cache."""
        if attention is self._bound:
            return
        caches = attention.caches
        _, _, kv_heads, _, head_dim = caches[0].shape
        rows = (self._call.q_heads + 2 * kv_heads) * head_dim
        if len(caches) != len(self._layers) or caches[0].dtype != self._embedding.dtype:
            raise ValueError("the cache does not fit the decoder")
        for struct, cache, layer in zip(self._structs, caches, self._layers, strict=True):
            if layer.qkv.outputs != rows or layer.output.inputs != self._call.q_heads * head_dim:
                raise ValueError("the projections do not fit the cache's heads")
            struct.cache = cache.data_ptr()
        if self._tables.cos.shape[1] != head_dim // 2:
            raise ValueError("the rotary tables do not fit the cache's heads")
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
