"""The own decoder's steps in the CPU kernels. Leaves hidden states that outlive a step to `decoder`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from services.gpu_worker import huge_memory
from services.gpu_worker.attention.base import AttentionBackend
from services.gpu_worker.attention.native import NativeAttention
from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.kernels import NativeUnavailable, library
from services.gpu_worker.kernels.decoder import LayerWeights, NativeDecoder
from services.gpu_worker.kernels.library import DTYPES, Library, LinearCall
from services.gpu_worker.kernels.logits import Blocks
from services.gpu_worker.layers.mlp import GatedMlp
from services.gpu_worker.layers.packed_linear import PackedLinear
from services.gpu_worker.models.families import DecoderConfig

if TYPE_CHECKING:
    from services.gpu_worker.layers.linear import Linear
    from services.gpu_worker.models.decoder import Decoder, DecoderLayer

# In fp32 torch's products win somewhere between 32 and 64 rows (135M model, one thread). In bf16 and int8 they never
# do: with AMX oneDNN takes 1.1 to 1.2 times as long from 64 to 512 rows, without AMX about as long. docs/performance.md
NATIVE_ROWS = 48
# Rows of logits whose memory is kept: what a step has that guesses, not what scores of long prompts need once.
KEPT_ROWS = 512
# fp32 models up to this size keep their plain weights too, for steps beyond NATIVE_ROWS.
SECOND_COPY_BYTES = 2 << 30

log = structlog.get_logger()


def native_kernels(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> Library | None:
    """The kernels to run `config` with; None where they cannot, or are not there."""
    if device.type != "cpu" or dtype not in DTYPES:
        return None
    reason = _obstacle(config, dtype)
    try:
        kernels = library.load()
    except NativeUnavailable as error:
        reason = str(error)
    else:
        if reason is None:
            return kernels
    log.info("decoder layers in plain torch", reason=reason)
    return None


def _obstacle(config: DecoderConfig, dtype: torch.dtype) -> str | None:
    if config.moe is not None:
        return "no kernel for experts"
    if config.activation not in ("silu", "swish"):
        return f"no kernel for activation {config.activation!r}"
    if dtype == torch.bfloat16 and (config.hidden % 2 or config.intermediate % 2):
        return "no bf16 kernel for odd sizes"
    return None


@dataclass(frozen=True, slots=True)
class _Way:
    """The memory that so many rows take through the head, made once: slices cost as much as small products."""

    states: torch.Tensor
    logits: torch.Tensor
    blocks: Blocks
    scales: NDArray[np.float32]  # of the blocks
    head: LinearCall

    def take_scales(self, scales: NDArray[np.float32] | None) -> None:
        self.scales[:] = 0 if scales is None else scales


class NativeStep:
    """Packed copies of a loaded decoder's weights; not for more than one thread.

    A token's logits do not depend on the rows beside it. `keeps_plain`: whether the decoder keeps its own weights too
    and runs larger steps with them; else these copies replace them, one after the other, and every step runs here.
    """

    def __init__(self, kernels: Library, decoder: Decoder, *, deterministic: bool, int8: bool = False) -> None:
        config = decoder.config
        linears = [decoder.head, *(linear for layer in decoder.layers for linear in layer.linears())]
        size = sum(linear.weight.nbytes for linear in linears)
        # One way of summing for all sizes of step is what deterministic asks for.
        loses = linears[0].weight.dtype == torch.float32 and not int8
        self.keeps_plain = loses and not deterministic and size <= SECOND_COPY_BYTES
        self._int8 = int8
        self._norm, self._eps = decoder.final_norm, config.norm_eps
        layers = [
            self._pack_layer(kernels, layer, rope)
            for layer, rope in zip(decoder.layers, config.rope_layers, strict=False)
        ]
        self._head = self._pack(kernels, decoder.head)
        self._layers = NativeDecoder(
            kernels, layers, decoder.embedding, decoder.rotary_tables(), q_heads=config.num_heads, eps=config.norm_eps
        )
        vocab = self._head.outputs
        # Rows that no step has are never touched, and so take no memory.
        self._logits = huge_memory.zeros(4 * KEPT_ROWS * vocab).view(torch.float32).view(KEPT_ROWS, vocab)
        self._blocks = Blocks.empty(kernels, KEPT_ROWS, vocab)
        self._states = torch.empty((KEPT_ROWS, config.hidden), dtype=decoder.embedding.dtype)
        self._ways: dict[int, _Way] = {}

    def takes(self, rows: int) -> bool:
        return not self.keeps_plain or rows <= NATIVE_ROWS

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> tuple[torch.Tensor, Blocks | None]:
        """fp32 logits [L, vocab] of the batch's `logit_rows` and what is known of them, both until the next call.

        Always the same memory for up to KEPT_ROWS: new pages cost more than the products that fill them.
        """
        rows = batch.logit_rows.shape[0]
        if not 0 < rows <= KEPT_ROWS:
            return self.logits(self.states(batch, batch.logit_rows, attention), batch.scales)
        way = self._way(rows)
        way.take_scales(batch.scales)
        self._layers.forward(
            batch.token_ids, batch.positions, batch.logit_rows, _native(attention), out=way.states, head=way.head
        )
        return way.logits, way.blocks

    def states(self, batch: ForwardBatch, keep: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """What is behind the last layer for tokens `keep` [L], not yet normalised: [L, hidden]."""
        return self._layers.forward(batch.token_ids, batch.positions, keep, _native(attention))

    def logits(self, x: torch.Tensor, scales: NDArray[np.float32] | None) -> tuple[torch.Tensor, Blocks | None]:
        """x [L, hidden], not yet normalised -> as `forward`. `scales` [L]: of the blocks' sums."""
        rows = x.shape[0]
        if not 0 < rows <= KEPT_ROWS:
            return self._head.forward(x, norm=self._norm, eps=self._eps, float32=True), None
        way = self._way(rows)
        way.take_scales(scales)
        self._head.forward(x, out=way.logits, norm=self._norm, eps=self._eps, float32=True, blocks=way.blocks)
        return way.logits, way.blocks

    def _way(self, rows: int) -> _Way:
        if rows not in self._ways:
            states, logits, blocks = self._states[:rows], self._logits[:rows], self._blocks.first(rows, is_lasting=True)
            head = self._head.prepared(states, logits, norm=self._norm, eps=self._eps, blocks=blocks)
            self._ways[rows] = _Way(states, logits, blocks, blocks.scales.numpy(), head)
        return self._ways[rows]

    def _pack_layer(self, kernels: Library, layer: DecoderLayer, rope: bool) -> LayerWeights:
        assert isinstance(layer.mlp, GatedMlp)
        return LayerWeights(
            qkv=self._pack(kernels, layer.qkv),
            output=self._pack(kernels, layer.output),
            gate_up=self._pack(kernels, layer.mlp.gate_up, gated=True),
            down=self._pack(kernels, layer.mlp.down),
            input_norm=layer.input_norm,
            mlp_norm=layer.mlp_norm,
            qk_norm=layer.qk_norm,
            spec=layer.spec,
            rope=rope,
        )

    def _pack(self, kernels: Library, linear: Linear, *, gated: bool = False) -> PackedLinear:
        packed = PackedLinear(kernels, linear.weight, linear.bias, gated=gated, int8=self._int8)
        if not self.keeps_plain:
            linear.release()
        return packed


def _native(attention: AttentionBackend) -> NativeAttention:
    if not isinstance(attention, NativeAttention):
        raise TypeError(f"weights packed for native attention, not for {type(attention).__name__}")
    return attention
