"""GGUF tensors -> bf16 safetensors shards under Hugging Face's names; leaves the configuration to `config`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors import TensorSpec, serialize_file

from radixfleet.models.errors import ModelError
from radixfleet.models.progress import Percent, Progress

SHARD_BYTES = 1 << 30
ROPE_FACTORS = "rope_freqs.weight"
_BF16_BYTES = 2

_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


@dataclass(frozen=True)
class HeadCounts:
    """Heads whose rows the file holds in interleaved rotary order; 0: rows are already in halves."""

    query: int
    key: int


def hf_name(name: str) -> str:
    """Raises ModelError for a tensor this converter does not know."""
    if name in _WHOLE:
        return _WHOLE[name]
    match = _BLOCK_NAME.fullmatch(name)
    if match is None or match[2] not in _BLOCK:
        raise ModelError(f"the GGUF file holds a tensor this converter does not know: {name}")
    return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.{match[3]}"


def to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The upper halves of float32, rounded to nearest even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def halves_from_interleaved(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Undo the row order of llama-type files: (pair, half) inside a head becomes (half, pair)."""
    pairs = rows.shape[0] // heads // 2
    return rows.reshape(heads, pairs, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def load(tensor: ReaderTensor, heads: HeadCounts) -> npt.NDArray[np.uint16]:
    """One tensor as bf16, in the row order of Hugging Face."""
    values = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    values = values.reshape(tuple(int(n) for n in reversed(tensor.shape)))
    part = tensor.name.split(".")[-2]
    if part == "attn_q" and heads.query:
        values = halves_from_interleaved(values, heads.query)
    elif part == "attn_k" and heads.key:
        values = halves_from_interleaved(values, heads.key)
    return to_bf16(np.ascontiguousarray(values))


def write_weights(reader: GGUFReader, folder: Path, heads: HeadCounts, say: Progress) -> None:
    """All tensors as model.safetensors, or as numbered shards with their index."""
    tensors = [tensor for tensor in reader.tensors if tensor.name != ROPE_FACTORS]
    shards = list(_shards(tensors))
    total = sum(int(tensor.n_elements) * _BF16_BYTES for tensor in tensors)
    percent = Percent("converting weights", total, say)
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / name, shard, heads, percent)
        index.update({hf_name(tensor.name): name for tensor in shard})
    if len(shards) > 1:
        document = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / "model.safetensors.index.json").write_text(json.dumps(document, indent=1))


def _shards(tensors: list[ReaderTensor]) -> Iterator[list[ReaderTensor]]:
    shard: list[ReaderTensor] = []
    size = 0
    for tensor in tensors:
        needed = int(tensor.n_elements) * _BF16_BYTES
        if shard and size + needed > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += needed
    yield shard


def _write_shard(path: Path, shard: list[ReaderTensor], heads: HeadCounts, percent: Percent) -> None:
    kept: list[npt.NDArray[np.uint16]] = []  # TensorSpec holds bare addresses
    specs: dict[str, TensorSpec] = {}
    for tensor in shard:
        data = load(tensor, heads)
        kept.append(data)
        specs[hf_name(tensor.name)] = TensorSpec(
            dtype="bfloat16", shape=list(data.shape), data_ptr=data.ctypes.data, data_len=data.nbytes
        )
        percent.add(data.nbytes)
    serialize_file(specs, str(path), {"format": "pt"})
    path.chmod(0o644)  # it was written for its owner alone; the cache may be shared
