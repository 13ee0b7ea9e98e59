"""The own Llama-like decoder: fused projections, ragged batches, logits only where wanted.

Leaves attention over the paged cache to a backend and the reading of files to `checkpoint`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection
from functools import partial

import torch
import torch.nn.functional as F

from services.gpu_worker.attention.base import AttentionBackend, AttentionSpec
from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.kernels.library import Library
from services.gpu_worker.kernels.logits import Blocks
from services.gpu_worker.layers.linear import Linear, MakeProduct
from services.gpu_worker.layers.mlp import GatedMlp
from services.gpu_worker.layers.moe import ExpertsMaker, SparseMlp
from services.gpu_worker.layers.norm import add_norm, rms_norm
from services.gpu_worker.layers.rotary import Rotary, RotaryTables, rotate
from services.gpu_worker.models.families import DecoderConfig
from services.gpu_worker.models.kv_scales import is_kv_scale
from services.gpu_worker.models.native_step import NativeStep
from services.gpu_worker.parallel.group import TensorGroup
from services.gpu_worker.parallel.sharding import Shard

RopeTables = tuple[torch.Tensor, torch.Tensor]

_OLD_ROPE_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


class DecoderLayer:
    """One layer: norm, fused QKV, rope, attention, output, norm, a gated MLP or experts.

    `config` has the heads and columns of this rank; with a group, what output and the MLP give is a part of a sum.
    """

    def __init__(
        self,
        index: int,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        deterministic: bool,
        group: TensorGroup | None = None,
        quantized: bool = False,
    ) -> None:
        """`quantized`: products get their memory from `place`, one layer after the other, and lose it again soon."""
        self.index = index
        self.spec = attention_spec(config, index)
        self._has_rope = config.rope_layers[index]
        self._heads, self._kv_heads, self._dim = config.num_heads, config.kv_heads, config.head_dim
        self._eps = config.norm_eps
        products = torch.device("meta") if quantized else device
        linear = partial(Linear.empty, dtype=dtype, device=products)
        rows = (config.num_heads + 2 * config.kv_heads) * config.head_dim
        self.qkv = linear(rows, config.hidden, bias=config.qkv_bias)
        self.output = linear(config.hidden, config.num_heads * config.head_dim, bias=config.output_bias)
        self.mlp = _mlp(config, index, dtype, products, deterministic=deterministic)
        self.input_norm = torch.empty(config.hidden, dtype=dtype, device=device)
        self.mlp_norm = torch.empty(config.hidden, dtype=dtype, device=device)
        # q_norm and k_norm share one [heads + kv_heads, dim] weight so that one call normalises both.
        self.qk_norm = (
            torch.empty((config.num_heads + config.kv_heads, config.head_dim), dtype=dtype, device=device)
            if config.qk_norm
            else None
        )
        self._add_norm = group.sum_add_norm if group is not None else add_norm

    def linears(self) -> tuple[Linear, ...]:
        """All products but those of experts."""
        own = (self.qkv, self.output)
        return (*own, *self.mlp.linears()) if isinstance(self.mlp, GatedMlp) else own

    def place(self, device: torch.device) -> None:
        """Memory for products that were made without."""
        for linear in self.linears():
            linear.place(device)

    def forward(
        self,
        normed: torch.Tensor,
        x: torch.Tensor,
        rope: RopeTables,
        attention: AttentionBackend,
        next_norm: torch.Tensor,
        keep: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, hidden] (changed in place), also normalised by `input_norm` -> the next x, first by `next_norm`.

        With `keep` [L] these are only its rows.
        """
        q, k, v = self._project(normed, rope)
        mixed = attention.forward(self.index, q, k, v, self.spec).reshape(x.shape[0], -1)
        if keep is not None:
            x, mixed = x[keep], mixed[keep]
        normed, x = self._add_norm(self.output(mixed), x, self.mlp_norm, self._eps)
        return self._add_norm(self.mlp(normed), x, next_norm, self._eps)

    def _project(self, x: torch.Tensor, rope: RopeTables) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[T, hidden] -> q [T, Hq, D], k and v [T, Hkv, D], normalised and rotated as the layer wants."""
        fused = self.qkv(x).view(x.shape[0], -1, self._dim)
        qk, v = fused[:, : -self._kv_heads], fused[:, -self._kv_heads :]
        if self.qk_norm is not None:
            qk = rms_norm(qk, self.qk_norm, self._eps)
        if self._has_rope:
            qk = rotate(qk, rope)
        return qk[:, : self._heads], qk[:, self._heads :], v


class Decoder:
    """Weights and forward pass of one model; memory is allocated here and filled by name."""

    def __init__(
        self,
        config: DecoderConfig,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_context: int,
        deterministic: bool = False,
        group: TensorGroup | None = None,
        quantize: MakeProduct | None = None,
    ) -> None:
        """`quantize`: how the layers' products are kept; embedding and head stay what they are."""
        self.config = config
        self._device = device
        self._group = group
        self._quantize = quantize
        self._tiles: dict[torch.Size, int] = {}
        self._shard = Shard(group.rank, group.size) if group is not None else Shard()
        self.own = self._shard.config(config)  # what of it is this rank's
        self.embedding = torch.empty((config.vocab_size, config.hidden), dtype=dtype, device=device)
        self.layers = [
            DecoderLayer(
                index,
                self.own,
                dtype,
                device,
                deterministic=deterministic,
                group=group,
                quantized=quantize is not None,
            )
            for index in range(config.num_layers)
        ]
        self.final_norm = torch.empty(config.hidden, dtype=dtype, device=device)
        rows = self._shard.vocabulary(config.vocab_size)
        self.head = Linear(self.embedding[rows.start : rows.stop])
        if not config.tied:
            self.head = Linear.empty(len(rows), config.hidden, bias=False, dtype=dtype, device=device)
        self._max_context = max_context
        self._rotary = Rotary(config.rope, max_context, device, deterministic=deterministic)
        self._deterministic = deterministic
        self._native: NativeStep | None = None
        self.blocks: Blocks | None = None  # what the product that made the last forward's logits has noted of them

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold a forward, as far as the layers are concerned."""
        return all(layer.mlp.capturable for layer in self.layers if isinstance(layer.mlp, SparseMlp))

    @property
    def is_native(self) -> bool:
        """Whether its layers run in the CPU kernels."""
        return self._native is not None

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        """fp32 logits [len(batch.logit_rows), vocab]; of a group only rank 0 has them all."""
        self.blocks = None
        wanted, hidden = batch.logit_rows, batch.hidden
        native = self._native if self._native is not None and self._native.takes(batch.num_tokens) else None
        if native is not None and hidden is None and batch.num_tokens:
            attention.plan(batch)
            logits, self.blocks = native.forward(batch, attention)
            return logits
        if hidden is not None and len(hidden.kept):
            wanted = torch.cat([wanted, hidden.kept])
        normed, x = self._states(batch, wanted, attention)
        if hidden is not None:
            normed, x = None, hidden.exchange(x)
        if self._native is not None and self._native.takes(x.shape[0]):
            logits, self.blocks = self._native.logits(x, batch.scales)
            return logits
        if normed is None:
            normed = rms_norm(x, self.final_norm, self.config.norm_eps)
        logits = self.head(normed).float()
        return logits if self._group is None else self._gather(logits, self._group)

    def _states(
        self, batch: ForwardBatch, wanted: torch.Tensor, attention: AttentionBackend
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """What is behind the last layer for tokens `wanted` [L]: normalised, where that comes with it, and as it is."""
        if not batch.num_tokens:
            return None, self.embedding[:0]
        attention.plan(batch)
        if self._native is not None and self._native.takes(batch.num_tokens):
            return None, self._native.states(batch, wanted, attention)
        return self._layer_by_layer(F.embedding(batch.token_ids, self.embedding), batch, wanted, attention)

    def _gather(self, logits: torch.Tensor, group: TensorGroup) -> torch.Tensor:
        """This rank's columns -> all of them on rank 0."""
        missing = len(Shard(0, group.size).vocabulary(self.config.vocab_size)) - logits.shape[1]
        whole = group.gather_columns(F.pad(logits, (0, missing)) if missing else logits)
        return logits if whole is None else whole[:, : self.config.vocab_size].contiguous()

    def _layer_by_layer(
        self, x: torch.Tensor, batch: ForwardBatch, wanted: torch.Tensor, attention: AttentionBackend
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden] -> the rows that are wanted, [L, hidden], first normalised, then as they are."""
        rope = self._rotary.tables(batch.positions)
        normed = rms_norm(x, self.layers[0].input_norm, self.config.norm_eps)
        for layer, following in itertools.pairwise(self.layers):
            normed, x = layer.forward(normed, x, rope, attention, following.input_norm, None)
        return self.layers[-1].forward(normed, x, rope, attention, self.final_norm, wanted)

    def rotary_tables(self) -> RotaryTables:
        """For kernels that look the rotations up."""
        return RotaryTables(self._rotary, self._max_context)

    def targets(self, names: Collection[str] = ()) -> dict[str, torch.Tensor]:
        """Every tensor a checkpoint must have, by its name there, as the place it belongs in.

        `names`: all that the checkpoint has, for what may be stored in one way or another.
        """
        found = self._outer_targets()
        for layer in self.layers:
            found.update(_layer_targets(layer, self.own, names))
        return found

    def _outer_targets(self) -> dict[str, torch.Tensor]:
        found = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.final_norm}
        if not self.config.tied:
            found["lm_head.weight"] = self.head.weight
        return found

    def load(self, fill: Callable[[dict[str, torch.Tensor]], None], names: Collection[str] = ()) -> None:
        """Have all targets filled, some at a time: no more than one layer of plain weights is there when quantising.

        `names`: as for `targets`.
        """
        fill(self._outer_targets())
        for layer in self.layers:
            layer.place(self._device)
            fill(_layer_targets(layer, self.own, names))
            if self._quantize is not None:
                for linear in layer.linears():
                    linear.prepare(deterministic=self._deterministic, tiles=self._tiles, quantize=self._quantize)

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Of a checkpoint's tensor what belongs in the target of this name."""
        return self._shard.part(name, tensor)

    def whole_shape(self, name: str, target: torch.Tensor) -> tuple[int, ...]:
        """The shape a checkpoint's tensor has whose part is the target of this name."""
        if name == "lm_head.weight":
            return tuple(self.embedding.shape)
        return self._shard.whole_shape(name, target.shape)

    def ignorable(self, name: str) -> bool:
        """Tensors a checkpoint may have beyond `targets`: a copy of the tied head, old buffers, scales of K and V."""
        if name == "lm_head.weight" and self.config.tied:
            return True
        return _OLD_ROPE_BUFFER.fullmatch(name) is not None or is_kv_scale(name)

    def finish_loading(
        self, kernels: Library | None = None, *, int8: bool = False, make_experts: ExpertsMaker | None = None
    ) -> None:
        """Once all weights are in place: what depends on their values.

        With `kernels` the decoder runs over native attention only; `int8` is how these then keep the weights.
        `make_experts`: tried before the reference.
        """
        for layer in self.layers:
            if layer.qk_norm is not None:
                _spread_qk_norm(layer.qk_norm, self.own)
        if kernels is not None:
            self._native = NativeStep(kernels, self, deterministic=self._deterministic, int8=int8)
            if not self._native.keeps_plain:
                return
        if self._quantize is not None:
            self.head.prepare(deterministic=self._deterministic)
            return
        for linear in (self.head, *(linear for layer in self.layers for linear in layer.linears())):
            linear.prepare(deterministic=self._deterministic, tiles=self._tiles)
        for layer in self.layers:
            if isinstance(layer.mlp, SparseMlp):
                layer.mlp.prepare(make_experts, tiles=self._tiles)


def attention_spec(config: DecoderConfig, layer: int) -> AttentionSpec:
    return AttentionSpec(scale=config.head_dim**-0.5, sliding_window=config.windows[layer])


def _mlp(
    config: DecoderConfig, index: int, dtype: torch.dtype, device: torch.device, *, deterministic: bool
) -> GatedMlp | SparseMlp:
    if config.moe is not None and config.moe.layers[index]:
        return SparseMlp(
            config.moe, config.hidden, config.activation, dtype=dtype, device=device, deterministic=deterministic
        )
    return GatedMlp(
        config.hidden,
        config.intermediate,
        config.activation,
        bias=config.mlp_bias,
        dtype=dtype,
        device=device,
        deterministic=deterministic,
    )


def _layer_targets(layer: DecoderLayer, config: DecoderConfig, names: Collection[str]) -> dict[str, torch.Tensor]:
    prefix = f"model.layers.{layer.index}."
    q, kv = config.num_heads * config.head_dim, config.kv_heads * config.head_dim
    parts = (
        (layer.qkv, "self_attn", (("q_proj", q), ("k_proj", kv), ("v_proj", kv))),
        (layer.output, "self_attn", (("o_proj", config.hidden),)),
    )
    found = {
        prefix + "input_layernorm.weight": layer.input_norm,
        prefix + "post_attention_layernorm.weight": layer.mlp_norm,
    }
    if layer.qk_norm is not None:
        found[prefix + "self_attn.q_norm.weight"] = layer.qk_norm[0]
        found[prefix + "self_attn.k_norm.weight"] = layer.qk_norm[config.num_heads]
    for linear, block, pieces in parts:
        start = 0
        for name, rows in pieces:
            found[f"{prefix}{block}.{name}.weight"] = linear.weight[start : start + rows]
            if linear.bias is not None:
                found[f"{prefix}{block}.{name}.bias"] = linear.bias[start : start + rows]
            start += rows
    mlp = layer.mlp.targets() if isinstance(layer.mlp, GatedMlp) else layer.mlp.targets(names, prefix)
    found.update({prefix + name: target for name, target in mlp.items()})
    return found


def _spread_qk_norm(weight: torch.Tensor, config: DecoderConfig) -> None:
    """The first query head's and the first key head's rows were loaded; the other heads repeat them."""
    weight[1 : config.num_heads] = weight[0].clone()
    weight[config.num_heads + 1 :] = weight[config.num_heads].clone()
