"""Tiny random checkpoints written with transformers, and ragged batches over scattered pages to run them with."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.model_runner import LoadedModel, ModelRunner, load_model

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

VOCABULARY = 128
UNDEFINED_PAGE = 2**31 - 1  # what a page table holds beyond a row's pages

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}

QWEN3_MOE = {"head_dim": 32, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}

# name -> (architecture's prefix, settings beyond SMALL; None drops a setting)
OWN_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32, "hidden_act": "gelu"}),
    "llama-biased-silu": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"sliding_window": 9, "head_dim": 32}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-windows": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": 9}),
    "qwen3-moe": ("Qwen3Moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        {**QWEN3_MOE, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
}

OTHER_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2",
        {"head_dim": 16, "sliding_window": 9, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 24},
    ),
    "gpt-neox": ("GPTNeoX", {"num_key_value_heads": None, "rotary_pct": 0.25}),
    "olmo2": ("Olmo2", {}),
    "phi3-longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [1.0 + i for i in range(8)],
                "rope_theta": 10000.0,
            },
        },
    ),
    "phi": ("Phi", {"partial_rotary_factor": 0.5}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "gpt2": ("GPT2", {"num_key_value_heads": None}),
}


def make_model(name: str, **overrides: Any) -> Any:
    """A random fp32 model of transformers; weights are large enough for logits to differ clearly."""
    prefix, settings = {**OWN_MODELS, **OTHER_MODELS}[name]
    settings = {**SMALL, **settings, **overrides}
    dropped = {key for key in ("num_key_value_heads",) if settings[key] is None}  # strict configurations know no None
    config = getattr(transformers, prefix + "Config")(**{k: v for k, v in settings.items() if k not in dropped})
    kind = getattr(transformers, prefix + ("LMHeadModel" if prefix == "GPT2" else "ForCausalLM"))
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = kind._from_config(config, attn_implementation="eager").eval()
        for parameter_name, parameter in model.named_parameters():
            parameter.data.normal_(1.0 if "norm" in parameter_name else 0.0, 0.15)
    return model


def save_model(name: str, folder: Path, *, max_shard_size: str = "5GB", **overrides: Any) -> Any:
    """Write the model to `folder` and return it."""
    model = make_model(name, **overrides)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def load(folder: Path, **overrides: Any) -> LoadedModel:
    """Load with plain settings: CPU, fp32, reference attention."""
    options: dict[str, Any] = {
        "device": torch.device("cpu"),
        "dtype": torch.float32,
        "load_format": "auto",
        "model_impl": "auto",
        "attention_backend": "reference",
        "context_length": 0,
        "deterministic": False,
    }
    return load_model(str(folder), **{**options, **overrides})


def random_tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY), k=count)


def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """transformers' own fp32 logits of every position, [len(tokens), vocab]."""
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens])).logits[0].float()
    return logits


@dataclass
class Sequence:
    """One growing sequence with its scattered pages."""

    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    pages: list[int] = field(default_factory=list)


class Session:
    """Sequences over one runner: hands out random pages, builds ragged batches, keeps no KV itself."""

    def __init__(self, loaded: LoadedModel, *, num_pages: int = 64, page_size: int = 4, seed: int = 0) -> None:
        self.runner: ModelRunner = loaded.build_runner(num_pages, page_size, 512)
        for layer in self.runner.kv_cache.layers:
            layer.fill_(float("nan"))  # whatever was never written must never matter
        self._size = page_size
        self._free = random.Random(seed).sample(range(num_pages), num_pages)

    def step(self, work: list[tuple[Sequence, int]]) -> torch.Tensor:
        """Compute the next n tokens of each sequence; returns the logits of all of them, [sum n, vocab]."""
        batch = self.batch(work)
        logits = self.runner.forward(batch).clone()  # the runner's own last until the next step
        for sequence, count in work:
            sequence.computed += count
        return logits

    def batch(self, work: list[tuple[Sequence, int]]) -> ForwardBatch:
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        indptr, lengths = [0], []
        for sequence, count in work:
            start, end = sequence.computed, sequence.computed + count
            while len(sequence.pages) * self._size < end:
                sequence.pages.append(self._free.pop())
            token_ids += sequence.tokens[start:end]
            positions += range(start, end)
            slots += [sequence.pages[p // self._size] * self._size + p % self._size for p in range(start, end)]
            indptr.append(indptr[-1] + count)
            lengths.append(end)
        width = max(len(sequence.pages) for sequence, _ in work) + 2
        tables = [s.pages + [UNDEFINED_PAGE] * (width - len(s.pages)) for s, _ in work]
        decodes = next((i for i, (_, count) in enumerate(work) if count > 1), len(work))
        return ForwardBatch(
            token_ids=torch.tensor(token_ids),
            positions=torch.tensor(positions),
            qo_indptr=torch.tensor(indptr, dtype=torch.int32),
            kv_lengths=torch.tensor(lengths, dtype=torch.int32),
            page_tables=torch.tensor(tables, dtype=torch.int32),
            kv_slots=torch.tensor(slots),
            logit_rows=torch.arange(len(token_ids)),
            num_decode_rows=decodes,
        )
