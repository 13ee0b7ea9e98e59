"""One GGUF file -> one folder in Hugging Face's layout; the order of the work and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader

from radixfleet.models.errors import ModelError
from radixfleet.models.gguf import config, tensors, tokenizer
from radixfleet.models.gguf.metadata import Metadata
from radixfleet.models.progress import Progress


def convert(source: Path, folder: Path, say: Progress) -> None:
    """Write config, tokenizer and weights of `source` into the existing `folder`. Raises ModelError."""
    say(f"converting {source.name} (once)")
    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError, OSError) as error:
        raise ModelError(f"{source} cannot be read as GGUF: {error}") from error
    meta = Metadata(reader)
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    if "token_embd.weight" not in by_name:
        raise ModelError(f"{source} holds no token embedding; is it one part of a split model?")
    factors = by_name.get(tensors.ROPE_FACTORS)
    document = config.build_config(
        meta,
        vocab_size=int(by_name["token_embd.weight"].shape[1]),
        tied="output.weight" not in by_name,
        biased="blk.0.attn_q.bias" in by_name,
        rope_factors=None if factors is None else np.asarray(factors.data, dtype=np.float32),
    )
    _write(folder / "config.json", document)
    _write(folder / "generation_config.json", config.build_generation_config(meta))
    tokenizer.write_tokenizer(meta, folder)
    # Only llama-type files permute q and k for interleaved rotary pairs.
    permuted = meta.arch == "llama"
    heads = tensors.HeadCounts(
        query=document["num_attention_heads"] if permuted else 0,
        key=document["num_key_value_heads"] if permuted else 0,
    )
    tensors.write_weights(reader, folder, heads, say)


def _write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
