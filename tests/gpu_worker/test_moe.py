"""Blocks of experts: routing, naming of checkpoints, independence of a token from its neighbours, parts of ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.gpu_worker.layers.moe import MoeConfig, SortedExperts, SparseMlp
from services.gpu_worker.models.config import ModelError, UnsupportedModel
from services.gpu_worker.models.families import read_decoder_config
from services.gpu_worker.parallel.sharding import Shard
from tests.gpu_worker.tiny_models import (
    OWN_MODELS,
    SMALL,
    Sequence,
    Session,
    load,
    make_model,
    random_tokens,
    reference_logits,
    save_model,
)

CPU = torch.device("cpu")
MODELS = ("mixtral", "qwen3-moe", "qwen3-moe-mixed")
PER_EXPERT = {"mixtral": "block_sparse_moe.experts.0.w1.weight", "qwen3-moe": "mlp.experts.0.gate_proj.weight"}


def experts(count: int = 5, hidden: int = 32, columns: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    gate_up = torch.randn(count, 2 * columns, hidden, generator=generator) * 0.2
    return gate_up, torch.randn(count, hidden, columns, generator=generator) * 0.2


def inputs(
    tokens: int, count: int = 5, k: int = 2, hidden: int = 32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator)
    weights, choice = torch.rand(tokens, count, generator=generator).topk(k)
    return x, choice.int(), weights


def one_by_one(
    gate_up: torch.Tensor, down: torch.Tensor, x: torch.Tensor, choice: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The definition: every token's chosen experts, weighted and added."""
    out = torch.zeros_like(x)
    for token, (row, chosen, scales) in enumerate(zip(x, choice.tolist(), weights, strict=True)):
        for expert, scale in zip(chosen, scales, strict=True):
            gate, up = (gate_up[expert] @ row).chunk(2)
            out[token] += scale * (down[expert] @ (torch.nn.functional.silu(gate) * up))
    return out


@pytest.mark.parametrize("tokens", [0, 1, 2, 33])
def test_sorted_experts_are_the_weighted_sum_of_the_chosen(tokens: int) -> None:
    gate_up, down = experts()
    given = inputs(tokens)
    actual = SortedExperts(gate_up, down, "silu")(*given)
    torch.testing.assert_close(actual, one_by_one(gate_up, down, *given), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tokens_experts_do_not_depend_on_its_neighbours(dtype: torch.dtype) -> None:
    gate_up, down = (weight.to(dtype) for weight in experts())
    run = SortedExperts(gate_up, down, "silu", deterministic=True)
    x, choice, weights = inputs(37)
    x = x.to(dtype)
    together = run(x, choice, weights)
    for start, stop in itertools.pairwise((0, 1, 2, 9, 30, 37)):
        assert torch.equal(run(x[start:stop], choice[start:stop], weights[start:stop]), together[start:stop])


@pytest.mark.parametrize("normalised", [False, True])
def test_routing_takes_the_best_and_scales_them_if_asked(normalised: bool) -> None:
    config = MoeConfig(4, 2, 8, normalised, (True,), "mlp", ("gate_proj", "up_proj", "down_proj"))
    block = SparseMlp(config, 4, "silu", dtype=torch.float32, device=CPU, deterministic=False)
    block.router.weight.copy_(torch.eye(4))
    choice, weights = block.route(torch.tensor([[0.0, 3.0, 1.0, 2.0]]))
    assert choice.tolist() == [[1, 3]]
    expected = torch.tensor([0.0, 3.0, 1.0, 2.0]).softmax(0)[[1, 3]]
    torch.testing.assert_close(weights[0], expected / expected.sum() if normalised else expected)
    with pytest.raises(RuntimeError, match="before their weights are prepared"):
        block(torch.zeros(1, 4))


@pytest.mark.parametrize("name", sorted(PER_EXPERT))
def test_checkpoints_with_and_without_stacked_experts_are_the_same_model(tmp_path: Path, name: str) -> None:
    separate, stacked = tmp_path / "separate", tmp_path / "stacked"
    model = save_model(name, separate)
    model.save_pretrained(stacked, save_original_format=False)
    layer = "model.layers.0."
    assert layer + PER_EXPERT[name] in load_file(separate / "model.safetensors")
    assert layer + "mlp.experts.gate_up_proj" in load_file(stacked / "model.safetensors")
    tokens = random_tokens(13, seed=1)
    logits = [Session(load(folder, model_impl="own")).step([(Sequence(tokens), 13)]) for folder in (separate, stacked)]
    assert torch.equal(*logits)
    torch.testing.assert_close(logits[0], reference_logits(model, tokens), rtol=0, atol=1e-4)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    save_model("mixtral", tmp_path)
    path = tmp_path / "model.safetensors"
    lost = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    save_file({n: t for n, t in load_file(path).items() if n != lost}, path, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"missing tensors: {lost}"):
        load(tmp_path, model_impl="own")


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe-mixed"])
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_deterministic_logits_are_the_same_alone_and_in_a_batch(tmp_path: Path, name: str, backend: str) -> None:
    save_model(name, tmp_path)
    loaded = load(tmp_path, model_impl="own", deterministic=True, attention_backend=backend)
    prompts = [random_tokens(length, seed=length) for length in (5, 11, 18)]
    together = Session(loaded).step([(Sequence(tokens), len(tokens)) for tokens in prompts])
    alone = []
    for tokens in prompts:
        session, sequence = Session(loaded, seed=9), Sequence(tokens)
        alone += [session.step([(sequence, 2)]), session.step([(sequence, len(tokens) - 2)])]
    assert torch.equal(together, torch.cat(alone))


def test_bf16_stays_as_near_to_fp32_as_transformers_does(tmp_path: Path) -> None:
    model = save_model("qwen3-moe", tmp_path)
    tokens = random_tokens(37, seed=1)
    logits = Session(load(tmp_path, dtype=torch.bfloat16)).step([(Sequence(tokens), 37)])
    expected = reference_logits(model, tokens)
    theirs = reference_logits(model.to(torch.bfloat16), tokens)
    assert (logits - expected).abs().mean() < 1.5 * (theirs - expected).abs().mean()


def test_dummy_weights_fill_every_expert(tmp_path: Path) -> None:
    save_model("qwen3-moe", tmp_path)
    logits = Session(load(tmp_path, load_format="dummy")).step([(Sequence(random_tokens(9, seed=1)), 9)])
    assert logits.isfinite().all()


def test_int8_is_refused_for_experts(tmp_path: Path) -> None:
    save_model("mixtral", tmp_path)
    with pytest.raises(ModelError, match="--quantization int8"):
        load(tmp_path, quantization="int8", attention_backend="native")


def test_which_layers_have_experts() -> None:
    config = {**SMALL, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    moe = read_decoder_config("Qwen3MoeForCausalLM", config).moe
    assert moe is not None
    assert moe.layers == (False, True, False, False, False, True)
    dense = read_decoder_config("Qwen3MoeForCausalLM", {**config, "mlp_only_layers": list(range(6))})
    assert dense.moe is None
    with pytest.raises(UnsupportedModel, match="9 of 4 experts"):
        read_decoder_config("MixtralForCausalLM", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 9})


@pytest.mark.parametrize("name", MODELS)
def test_the_parts_of_two_ranks_add_up_to_the_block(name: str) -> None:
    model = make_model(name)
    whole = read_decoder_config(OWN_MODELS[name][0] + "ForCausalLM", model.config.to_dict())
    assert whole.moe is not None
    sizes = whole.moe.experts, whole.hidden, whole.moe.intermediate
    gate_up, down = experts(*sizes)
    given = inputs(7, count=whole.moe.experts, k=whole.moe.top_k, hidden=whole.hidden)
    total = torch.zeros_like(given[0])
    for rank in (0, 1):
        shard = Shard(rank, 2)
        own = shard.config(whole).moe
        assert own is not None
        assert own.intermediate == whole.moe.intermediate // 2
        part = SparseMlp(own, whole.hidden, "silu", dtype=torch.float32, device=CPU, deterministic=False)
        stacked = part.targets({"mlp.experts.gate_up_proj"}, "")
        separate = part.targets((), "")
        for block, weight in (("gate_up_proj", gate_up), ("down_proj", down)):
            stacked[f"mlp.experts.{block}"].copy_(shard.part(f"l.mlp.experts.{block}", weight))
        gate, up, down_name = whole.moe.parts
        for expert in range(whole.moe.experts):
            halves = gate_up[expert].chunk(2)
            for part_name, weight in ((gate, halves[0]), (up, halves[1]), (down_name, down[expert])):
                full = f"{whole.moe.block}.experts.{expert}.{part_name}.weight"
                assert torch.equal(separate[full], shard.part(full, weight)), "both namings mean the same part"
                assert shard.whole_shape(full, separate[full].shape) == tuple(weight.shape)
        total += SortedExperts(*part.weights, "silu")(*given)
    torch.testing.assert_close(total, SortedExperts(gate_up, down, "silu")(*given), rtol=0, atol=1e-5)
    with pytest.raises(ModelError, match="columns of an expert do not divide"):
        Shard(0, 4).config(replace(whole, kv_heads=4, intermediate=96, moe=replace(whole.moe, intermediate=10)))
