"""Experts for GPUs: FlashInfer's call against its recorded signature and a stand-in, grouped products, and trust."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from services.gpu_worker.layers import moe_fused
from services.gpu_worker.layers.moe import Experts, SortedExperts
from services.gpu_worker.layers.moe_fused import FusedExperts, GroupedExperts, TrustedMaker, experts_maker, swap_halves
from services.gpu_worker.models import loading
from services.gpu_worker.models.config import ModelError
from tests.gpu_worker.flashinfer_signatures import bind
from tests.gpu_worker.test_moe import experts, inputs
from tests.gpu_worker.tiny_models import Sequence, Session, load, random_tokens, save_model

CPU = torch.device("cpu")


class StandIn:
    """FlashInfer's two functions with their signatures and, as far as they are known, their demands."""

    def __init__(self, *, gate_first: bool = False, fails: str = "") -> None:
        self.rows: list[int] = []
        self._gate_first = gate_first
        self._fails = fails

    def cutlass_fused_moe_workspace_size(self, *args: Any, **keywords: Any) -> int:
        given = bind("cutlass_fused_moe_workspace_size", *args, **keywords)
        if self._fails:
            raise RuntimeError(self._fails)
        assert given["use_fused_finalize"] is False
        return int(given["max_num_tokens"])

    def cutlass_fused_moe(self, *args: Any, **keywords: Any) -> torch.Tensor:
        given = bind("cutlass_fused_moe", *args, **keywords)
        x, choice, weights = given["input"], given["token_selected_experts"], given["token_final_scales"]
        assert choice.dtype == torch.int32
        assert weights.dtype == torch.float32
        assert all(tensor.is_contiguous() for tensor in (x, choice, weights))
        assert given["quant_scales"] == []
        assert given["use_fused_finalize"] is False
        assert len(given["workspace_buffer"]) >= x.shape[0]
        gate_up = given["fc1_expert_weights"].clone()
        if not self._gate_first:
            swap_halves(gate_up)
        self.rows.append(x.shape[0])
        out = SortedExperts(gate_up, given["fc2_expert_weights"], "silu")(x, choice, weights)
        written: torch.Tensor = given["output"].copy_(out)
        return written

    def candidate(self, gate_up: torch.Tensor, down: torch.Tensor, _activation: str) -> Experts:
        return FusedExperts(self, gate_up, down, FusedExperts.workspace(self, gate_up, 2))


def test_the_fused_call_gives_the_references_result_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_fused, "FUSED_ROWS", 10)
    gate_up, down = experts()
    given, module = inputs(23), StandIn()
    expected = SortedExperts(gate_up.clone(), down, "silu")(*given)
    torch.testing.assert_close(module.candidate(gate_up, down, "silu")(*given), expected)
    assert module.rows == [10, 10, 3]


@pytest.mark.parametrize("tokens", [0, 1, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_give_the_references_result(tokens: int, dtype: torch.dtype) -> None:
    gate_up, down = (weight.to(dtype) for weight in experts())
    x, choice, weights = inputs(tokens)
    actual = GroupedExperts(gate_up, down, "silu")(x.to(dtype), choice, weights)
    expected = SortedExperts(gate_up, down, "silu")(x.to(dtype), choice, weights)
    assert actual.dtype == dtype
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.05)


def test_grouped_products_of_many_tokens_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, down = experts()
    run, given = GroupedExperts(gate_up, down, "silu"), inputs(23)
    whole = run(*given)
    monkeypatch.setattr(moe_fused, "GROUPED_PAIRS", 12)
    torch.testing.assert_close(run(*given), whole)


def test_graphs_hold_experts_that_do_not_ask_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model("qwen3-moe-mixed", tmp_path)
    assert not replace(load(tmp_path, model_impl="own"), attention_backend="auto").is_capturable
    monkeypatch.setattr(loading, "experts_maker", lambda *_given: TrustedMaker({"torch": GroupedExperts}, 3))
    loaded = load(tmp_path, model_impl="own")
    assert replace(loaded, attention_backend="auto").is_capturable
    tokens = random_tokens(19, seed=3)
    logits = Session(loaded).step([(Sequence(tokens), 19)])
    expected = Session(load(tmp_path, model_impl="own", deterministic=True)).step([(Sequence(tokens), 19)])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_what_agrees_is_taken_for_every_layer() -> None:
    module = StandIn()
    make = TrustedMaker({"fused": module.candidate, "torch": GroupedExperts}, top_k=2)
    for _ in range(2):
        assert isinstance(make(*experts(), "silu"), FusedExperts)
    assert len(module.rows) == 1, "one layer is enough of a trial"


@pytest.mark.parametrize("module", [StandIn(gate_first=True), StandIn(fails="no compiler")])
def test_what_fails_or_gives_something_else_leaves_the_weights_as_they_were(module: StandIn) -> None:
    gate_up, down = experts()
    before = gate_up.clone()
    make = TrustedMaker({"fused": module.candidate, "torch": GroupedExperts}, top_k=2)
    assert isinstance(make(gate_up, down, "silu"), GroupedExperts)
    assert torch.equal(gate_up, before)
    assert TrustedMaker({"fused": module.candidate}, top_k=2)(gate_up, down, "silu") is None
    assert torch.equal(gate_up, before)


def test_on_a_cpu_the_reference_runs_them(tmp_path: Path) -> None:
    assert experts_maker("auto", CPU, torch.bfloat16, 2) is None
    assert experts_maker("torch", CPU, torch.bfloat16, 2) is None
    save_model("mixtral", tmp_path)
    with pytest.raises(ModelError, match="--moe-backend flashinfer needs CUDA"):
        load(tmp_path, moe_backend="flashinfer")


@pytest.mark.parametrize(
    ("backend", "dtype", "compiled", "expected"),
    [
        ("auto", torch.bfloat16, True, ["flashinfer", "torch"]),
        ("auto", torch.bfloat16, False, ["torch"]),
        ("auto", torch.float16, False, []),
        ("torch", torch.bfloat16, True, ["torch"]),
        ("flashinfer", torch.float16, False, ["flashinfer"]),
    ],
)
def test_what_is_tried_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, backend: Any, dtype: torch.dtype, compiled: bool, expected: list[str]
) -> None:
    monkeypatch.setattr(moe_fused, "_is_compiled", lambda _device: compiled)
    make = experts_maker(backend, torch.device("cuda"), dtype, 2)
    assert isinstance(make, TrustedMaker)
    assert list(make._candidates) == expected
