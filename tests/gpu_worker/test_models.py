"""The own decoder against transformers' logits: whole, chunked and mixed, over scattered pages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker.model_runner import LoadedModel
from services.gpu_worker.models.config import ModelError, UnsupportedModel
from tests.gpu_worker.tiny_models import (
    OWN_MODELS,
    Sequence,
    Session,
    load,
    random_tokens,
    reference_logits,
    save_model,
)

TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["reference", "native"])
def backend(request: pytest.FixtureRequest) -> str:
    """The attention; with the native one the layers run in the kernels as well, where those can run the model."""
    return str(request.param)


@pytest.fixture(scope="module", params=sorted(OWN_MODELS))
def pair(
    request: pytest.FixtureRequest, backend: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, LoadedModel]:
    folder = tmp_path_factory.mktemp(request.param)
    return save_model(request.param, folder), load(folder, model_impl="own", attention_backend=backend)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=0, atol=TOLERANCE)


def test_whole_prefill_equals_transformers(pair: tuple[Any, LoadedModel]) -> None:
    model, loaded = pair
    tokens = random_tokens(37, seed=1)
    assert_close(Session(loaded).step([(Sequence(tokens), 37)]), reference_logits(model, tokens))


def test_odd_chunks_equal_transformers(pair: tuple[Any, LoadedModel]) -> None:
    model, loaded = pair
    tokens, session = random_tokens(41, seed=2), Session(loaded)
    sequence = Sequence(tokens)
    logits = [session.step([(sequence, count)]) for count in (7, 1, 13, 2, 17, 1)]
    assert_close(torch.cat(logits), reference_logits(model, tokens))


def test_mixed_batch_equals_transformers(pair: tuple[Any, LoadedModel]) -> None:
    model, loaded = pair
    session = Session(loaded, seed=3)
    old = [Sequence(random_tokens(length, seed=length)) for length in (6, 19, 33)]
    session.step([(sequence, len(sequence.tokens) - 1) for sequence in old])
    fresh = Sequence(random_tokens(23, seed=5))
    half = Sequence(random_tokens(30, seed=6))
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


def test_logits_only_where_wanted(pair: tuple[Any, LoadedModel]) -> None:
    model, loaded = pair
    session, tokens = Session(loaded), random_tokens(12, seed=9)
    batch = session.batch([(Sequence(tokens), 12)])
    wanted = torch.tensor([11, 3])
    picked = session.runner.forward(replace(batch, logit_rows=wanted))
    assert_close(picked, reference_logits(model, tokens)[wanted])
    none = session.runner.forward(replace(batch, logit_rows=torch.empty(0, dtype=torch.int64)))
    assert none.shape == (0, loaded.config.vocab_size)


def test_config_describes_the_model(tmp_path: Path) -> None:
    save_model("mistral", tmp_path)
    config = load(tmp_path).config
    assert config.architecture == "MistralForCausalLM"
    assert config.implementation == "own"
    assert (config.num_layers, config.num_heads, config.kv_heads, config.head_dim) == (2, 4, 2, 32)
    assert (config.vocab_size, config.hidden, config.max_context) == (128, 64, 256)
    assert config.eos_ids == (2,)
    assert [spec.sliding_window for spec in config.attention] == [9, 9]
    assert load(tmp_path).kv_bytes_per_page(16) == 2 * 2 * 2 * 16 * 32 * 4


def test_generation_config_names_the_end_tokens(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    assert load(tmp_path).config.eos_ids == (5, 2)


def test_context_length_is_limited_by_the_model(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    assert load(tmp_path, context_length=100).config.max_context == 100
    with pytest.raises(ModelError, match=r"1000 exceeds the model's 256"):
        load(tmp_path, context_length=1000)


def test_dynamic_rope_is_fixed_at_the_served_context(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = save_model("llama", tmp_path, rope_parameters=rope, max_position_embeddings=64)
    tokens = random_tokens(50, seed=4)
    assert_close(Session(load(tmp_path)).step([(Sequence(tokens), 50)]), reference_logits(model, tokens))
    long = random_tokens(128, seed=4)
    stretched = Session(load(tmp_path, context_length=128)).step([(Sequence(long), 128)])
    assert_close(stretched, reference_logits(model, long))


def test_context_of_yarn_is_the_stretched_one(tmp_path: Path) -> None:
    save_model("llama-yarn", tmp_path, max_position_embeddings=32)
    assert load(tmp_path).config.max_context == 128


def test_older_rope_keys_mean_the_same(tmp_path: Path) -> None:
    model = save_model("llama-llama3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    config["rope_scaling"] = scaling
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokens = random_tokens(37, seed=1)
    assert_close(Session(load(tmp_path)).step([(Sequence(tokens), 37)]), reference_logits(model, tokens))


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [(torch.bfloat16, "reference"), (torch.bfloat16, "native"), (torch.float16, "reference")],
)
def test_half_precision_stays_near_fp32(tmp_path: Path, dtype: torch.dtype, backend: str) -> None:
    model = save_model("qwen3", tmp_path)
    tokens = random_tokens(37, seed=1)
    loaded = load(tmp_path, dtype=dtype, attention_backend=backend)
    assert loaded.config.dtype is dtype
    logits = Session(loaded).step([(Sequence(tokens), 37)])
    expected = reference_logits(model, tokens)
    theirs = reference_logits(model.to(dtype), tokens)
    drift, their_drift = (logits - expected).abs().mean(), (theirs - expected).abs().mean()
    assert drift < 1.5 * their_drift


def test_too_many_tokens_are_refused(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    session = Session(load(tmp_path), num_pages=200)
    with pytest.raises(ValueError, match="600 tokens exceeds the limit of 512"):
        session.step([(Sequence(random_tokens(600, seed=1)), 600)])


def test_own_implementation_refuses_strangers(tmp_path: Path) -> None:
    save_model("olmo2", tmp_path)
    with pytest.raises(UnsupportedModel, match="Olmo2ForCausalLM"):
        load(tmp_path, model_impl="own")
