"""Architectures outside the own family, through transformers, against transformers' own logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker.attention.base import AttentionBackend
from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.model_runner import LoadedModel
from services.gpu_worker.models.config import ModelError, UnsupportedModel
from services.gpu_worker.models.trial import check_history
from tests.gpu_worker.tiny_models import (
    OTHER_MODELS,
    SMALL,
    Sequence,
    Session,
    load,
    random_tokens,
    reference_logits,
    save_model,
)

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=sorted(OTHER_MODELS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LoadedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    # Phi3's frequencies follow the length: the context is kept where short and long ones agree.
    context = 64 if request.param == "phi3-longrope" else 0
    return save_model(request.param, folder), load(folder, context_length=context)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def test_runs_through_transformers(pair: tuple[Any, LoadedModel]) -> None:
    model, loaded = pair
    assert loaded.config.implementation == "transformers"
    assert loaded.config.architecture == type(model).__name__
    assert len(loaded.config.attention) == 2
    assert loaded.config.vocab_size == 128


def test_chunks_equal_transformers(pair: tuple[Any, LoadedModel]) -> None:
    model, loaded = pair
    tokens, session = random_tokens(41, seed=2), Session(loaded)
    sequence = Sequence(tokens)
    logits = [session.step([(sequence, count)]) for count in (20, 1, 13, 2, 5)]
    assert_close(torch.cat(logits), reference_logits(model, tokens))


def test_mixed_batch_equals_transformers(pair: tuple[Any, LoadedModel]) -> None:
    model, loaded = pair
    session = Session(loaded, seed=3)
    old = [Sequence(random_tokens(length, seed=length)) for length in (6, 19, 33)]
    session.step([(sequence, len(sequence.tokens) - 1) for sequence in old])
    fresh, half = Sequence(random_tokens(23, seed=5)), Sequence(random_tokens(30, seed=6))
    session.step([(half, 11)])
    logits = session.step([*((sequence, 1) for sequence in old), (fresh, 23), (half, 19)])
    expected = [reference_logits(model, s.tokens)[-1:] for s in old]
    expected += [reference_logits(model, fresh.tokens), reference_logits(model, half.tokens)[11:]]
    assert_close(logits, torch.cat(expected))


def test_greedy_output_equals_generate(pair: tuple[Any, LoadedModel]) -> None:
    model, loaded = pair
    prompt, session = random_tokens(11, seed=8), Session(loaded)
    expected = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 11, dtype=torch.int64), max_new_tokens=20, do_sample=False
    )[0].tolist()
    sequence = Sequence(list(prompt))
    while len(sequence.tokens) < len(expected):
        logits = session.step([(sequence, len(sequence.tokens) - sequence.computed)])
        sequence.tokens.append(int(logits[-1].argmax()))
    assert sequence.tokens == expected


def test_the_own_family_runs_through_transformers_too(tmp_path: Path) -> None:
    model = save_model("qwen3", tmp_path)
    tokens = random_tokens(20, seed=1)
    loaded = load(tmp_path, model_impl="transformers")
    assert loaded.config.implementation == "transformers"
    assert loaded.config.digest == load(tmp_path, model_impl="own").config.digest
    assert_close(Session(loaded).step([(Sequence(tokens), 20)]), reference_logits(model, tokens))


def test_what_attention_needs_is_found_by_the_probe(tmp_path: Path) -> None:
    save_model("gemma2", tmp_path)
    specs = load(tmp_path).config.attention
    assert [spec.sliding_window for spec in specs] == [9, 0]
    assert [spec.soft_cap for spec in specs] == [5.0, 5.0]
    assert specs[0].scale == pytest.approx(24**-0.5)


def test_longrope_beyond_the_original_length_uses_the_long_factors(tmp_path: Path) -> None:
    model = save_model("phi3-longrope", tmp_path)
    tokens = random_tokens(100, seed=3)
    session = Session(load(tmp_path))
    assert_close(session.step([(Sequence(tokens), 100)]), reference_logits(model, tokens))


def write_config(folder: Path, **settings: Any) -> None:
    (folder / "config.json").write_text(json.dumps({**SMALL, **settings}))


REFUSED = {
    "sinks": (
        {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 2, "head_dim": 16},
        "s_aux",
    ),
    "a table of attention classes": (
        {"architectures": ["FalconForCausalLM"], "model_type": "falcon"},
        "does not take an attention function",
    ),
    "attention of its own": (
        {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm"},
        "does not take an attention function",
    ),
    "linear attention": (
        {"architectures": ["MiniMaxForCausalLM"], "model_type": "minimax", "num_local_experts": 2},
        r"only layers \[.*\] of 2 keep their state",
    ),
    "convolutions": (
        {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        r"only layers \[1\] of 2 keep their state",
    ),
    "a state beside attention": (
        {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "layer_types": ["attention", "attention"],
            "num_local_experts": 2,
        },
        "keeps state outside keys and values",
    ),
    "recurrent state": (
        {"architectures": ["MambaForCausalLM"], "model_type": "mamba"},
        "attention function|logits_to_keep|position_ids|max_position",
    ),
    "encoder": ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "cannot load|encoder"),
    "unknown": (
        {"architectures": ["NovelForCausalLM"], "model_type": "novel", "auto_map": {"AutoConfig": "evil.Config"}},
        "cannot load",
    ),
    "chunked attention": (
        {
            "architectures": ["Llama4ForCausalLM"],
            "model_type": "llama4_text",
            "attention_chunk_size": 8,
            "num_local_experts": 2,
            "head_dim": 16,
            "intermediate_size_mlp": 64,
        },
        "more than order and a sliding window",
    ),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_the_cache_cannot_hold_is_refused(tmp_path: Path, name: str) -> None:
    settings, reason = REFUSED[name]
    write_config(tmp_path, **settings)
    (tmp_path / "evil.py").write_text("raise SystemExit('code of a model folder was run')")
    with pytest.raises(UnsupportedModel, match=reason):
        load(tmp_path, load_format="dummy")


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_model("olmo2", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing tensors.*layers\.1\.mlp\.up_proj"):
        load(tmp_path)


def test_dummy_weights_repeat(tmp_path: Path) -> None:
    save_model("olmo2", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    tokens = random_tokens(9, seed=1)
    first, second = (Session(load(tmp_path, load_format="dummy")).step([(Sequence(tokens), 9)]) for _ in range(2))
    assert torch.equal(first, second)


class Forgetful:
    """A model whose logits depend on what came in the same step, not on the cache."""

    def __init__(self, *, forgets: bool) -> None:
        self.forgets = forgets

    def forward(self, batch: ForwardBatch, attention: AttentionBackend) -> torch.Tensor:
        attention.plan(batch)
        seen = torch.arange(batch.num_tokens) if self.forgets else batch.positions
        return seen[batch.logit_rows].float()[:, None].expand(-1, 4)


def test_a_state_outside_the_cache_is_found_by_the_trial(tmp_path: Path) -> None:
    save_model("olmo2", tmp_path)
    config = load(tmp_path).config
    check_history(Forgetful(forgets=False), config, torch.device("cpu"))
    with pytest.raises(UnsupportedModel, match="other logits in chunks than at once"):
        check_history(Forgetful(forgets=True), config, torch.device("cpu"))
