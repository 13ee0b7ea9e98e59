"""Which part of each weight a rank holds. Leaves loading to `checkpoint` and the layers to the decoder.

    qkv, gate_up     rows by rank: whole heads, whole columns of the MLP      x -> its own share, nothing to exchange
    output, down     columns by rank                                          partial sums -> added over all ranks
    experts          each as an MLP: every rank has a part of every expert    one sum for all that a token has chosen
    head             rows of the vocabulary by rank                           logits -> gathered at rank 0
    embedding, norms, routers on every rank
The cut is that of Megatron-LM (Shoeybi et al. 2019): two sums per layer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from services.gpu_worker.models.config import ModelError
from services.gpu_worker.models.families import DecoderConfig

_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3")
_BY_COLUMNS = ("o_proj", "down_proj", "w2")


@dataclass(frozen=True, slots=True)
class Shard:
    """The share of rank `rank` of `size`; the whole for size 1."""

    rank: int = 0
    size: int = 1

    def config(self, whole: DecoderConfig) -> DecoderConfig:
        """The layers of one rank. Raises ModelError where heads or columns do not divide."""
        for what, count in (
            ("query heads", whole.num_heads),
            ("key heads", whole.kv_heads),
            ("MLP columns", whole.intermediate),
            ("columns of an expert", 0 if whole.moe is None else whole.moe.intermediate),
        ):
            if count % self.size:
                raise ModelError(f"{count} {what} do not divide by --tp-size {self.size}")
        moe = whole.moe
        if moe is not None:
            moe = dataclasses.replace(moe, intermediate=moe.intermediate // self.size)
        return dataclasses.replace(
            whole,
            moe=moe,
            num_heads=whole.num_heads // self.size,
            kv_heads=whole.kv_heads // self.size,
            intermediate=whole.intermediate // self.size,
        )

    def vocabulary(self, vocab_size: int) -> range:
        """The rows of the head; the last rank may have fewer."""
        rows = -(-vocab_size // self.size)
        return range(min(self.rank * rows, vocab_size), min((self.rank + 1) * rows, vocab_size))

    def part(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The rank's part of a checkpoint's tensor, by its name there."""
        if self.size == 1:
            return tensor
        if name == "lm_head.weight":
            rows = self.vocabulary(tensor.shape[0])
            return tensor[rows.start : rows.stop]
        block, _, kind = name.rpartition(".")
        layer = block.rpartition(".")[2]
        if layer == "experts":
            return self._part_of_experts(kind, tensor)
        if layer in _BY_ROWS:
            return tensor.chunk(self.size)[self.rank]
        if layer in _BY_COLUMNS:
            if kind == "bias":
                return tensor if self.rank == 0 else torch.zeros_like(tensor)  # added once, not once per rank
            return tensor.chunk(self.size, dim=1)[self.rank]
        return tensor

    def _part_of_experts(self, kind: str, stacked: torch.Tensor) -> torch.Tensor:
        """Of all experts in one tensor: gate_up_proj [experts, 2 * columns, in], down_proj [experts, out, columns]."""
        if kind == "down_proj":
            return stacked.chunk(self.size, dim=2)[self.rank]
        gate, up = stacked.chunk(2, dim=1)
        return torch.cat([half.chunk(self.size, dim=1)[self.rank] for half in (gate, up)], dim=1)

    def whole_shape(self, name: str, part: torch.Size) -> tuple[int, ...]:
        """The shape of the tensor that `part` is a rank's part of; not for the head, whose parts may be unequal."""
        layer = name.rpartition(".")[0].rpartition(".")[2]
        if layer in _BY_ROWS:
            return (part[0] * self.size, *part[1:])
        if layer in _BY_COLUMNS and len(part) == 2:
            return (part[0], part[1] * self.size)
        return tuple(part)
