"""Writes small GGUF files the way converters do; shared by the tests of this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

CONTROL, NORMAL = 3, 1
PIECES = {
    "embed_tokens": "token_embd",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def byte_vocabulary() -> list[str]:
    """Two control tokens, the 256 byte letters, and a few merged words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return ["<|end|>", "<|im_end|>", *letters, "he", "hel", "lo", "hello", "Ġw", "Ġwo"]


MERGES = ["h e", "he l", "l o", "hel lo", "Ġ w", "Ġw o"]


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """The row order of llama-type files."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def gguf_name(name: str) -> str:
    """model.layers.3.self_attn.q_proj.weight -> blk.3.attn_q.weight"""
    if name == "model.norm.weight":
        return "output_norm.weight"
    if name == "lm_head.weight":
        return "output.weight"
    *rest, piece, kind = name.split(".")
    return f"blk.{rest[2]}.{PIECES[piece]}.{kind}" if "layers" in rest else f"{PIECES[piece]}.{kind}"


def write(path: Path, arch: str, config: dict[str, Any], weights: dict[str, np.ndarray], pre: str = "smollm") -> None:
    """`config` and `weights` under Hugging Face's names."""
    writer = gguf.GGUFWriter(str(path), arch)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    tokens = byte_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL, CONTROL] + [NORMAL] * (len(tokens) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    for name, values in weights.items():
        if arch == "llama" and "q_proj" in name:
            values = interleaved(values, heads)
        if arch == "llama" and "k_proj" in name:
            values = interleaved(values, kv_heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
