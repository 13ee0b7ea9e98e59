"""Sum, addition and norm over ranks: the reference, and a stand-in for FlashInfer's kernel."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from services.gpu_worker.layers.norm import add_norm, rms_norm
from services.gpu_worker.parallel import fused
from services.gpu_worker.parallel.group import TensorGroup
from tests.gpu_worker.flashinfer_signatures import bind

CPU = torch.device("cpu")
HIDDEN = 64
SIZES: dict[str, Any] = {"hidden": HIDDEN, "dtype": torch.bfloat16, "device": CPU, "tokens": 16}


class FakeComm:
    """`flashinfer.comm` between two ranks of which the other always brings what this one does."""

    AllReduceFusionPattern = SimpleNamespace(kARResidualRMSNorm=1)

    def __init__(self, fault: str = "") -> None:
        self.fault = fault
        self.made: list[dict[str, Any]] = []
        self.runs: list[int] = []
        self.destroyed = 0

    def create_allreduce_fusion_workspace(self, *args: Any, **kwargs: Any) -> Any:
        if self.fault == "set-up":
            raise RuntimeError("no access to the memory of a peer")
        self.made.append(bind("create_allreduce_fusion_workspace", *args, **kwargs))
        return SimpleNamespace(destroy=self._destroy)

    def allreduce_fusion(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        a = bind("allreduce_fusion", *args, **kwargs)
        x, residual = a["input"], a["residual_in"]
        if self.fault == "launch":
            raise RuntimeError("block_size > 1024")
        assert x.shape[0] <= self.made[0]["max_token_num"]
        assert x.is_contiguous()
        assert (a["pattern"], a["weight_bias"], a["residual_out"] is residual) == (1, 0.0, False)
        self.runs.append(x.shape[0])
        summed = 2 * x.float() + residual.float()
        a["residual_out"].copy_(summed)
        wide = summed * torch.rsqrt(summed.square().mean(-1, keepdim=True) + a["rms_eps"])
        a["norm_out"].copy_(wide * a["rms_gamma"].float() * (0.9 if self.fault == "numbers" else 1.0))
        if self.fault == "nan":
            a["norm_out"][0, 0] = float("nan")
        return a["norm_out"]

    def _destroy(self) -> None:
        self.destroyed += 1


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[TensorGroup]:
    """Rank 0 of two that are alike."""

    def all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> None:
        if op == dist.ReduceOp.SUM:
            tensor.mul_(2)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "new_group", lambda backend, timeout: f"{backend} for {timeout}")
    undone: list[Any] = []
    monkeypatch.setattr(fused.atexit, "register", undone.append)
    yield TensorGroup(0, 2, one_machine=True)
    for undo in undone:
        undo()


def given(rows: int, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn((rows, HIDDEN), generator=generator).bfloat16() for _ in range(2))
    return x, residual, torch.rand(HIDDEN, generator=generator).bfloat16() + 0.5


def test_the_reference_is_sum_then_add_then_norm(group: TensorGroup) -> None:
    x, residual, weight = given(5)
    added = residual + 2 * x
    normed, summed = group.sum_add_norm(x.clone(), residual.clone(), weight, 1e-6)
    assert torch.equal(summed, added)
    assert torch.equal(normed, rms_norm(added, weight, 1e-6))
    alone, before = add_norm(x.clone(), residual.clone(), weight, 1e-6)
    assert torch.equal(before, residual + x)
    assert torch.equal(alone, rms_norm(residual + x, weight, 1e-6))


def test_the_kernel_takes_small_steps_and_gives_the_same(group: TensorGroup) -> None:
    api = FakeComm()
    one_kernel = fused.build(api, group, **SIZES)
    assert one_kernel is not None
    made = api.made[0]
    assert (made["backend"], made["world_size"], made["rank"], made["hidden_dim"]) == ("trtllm", 2, 0, HIDDEN)
    assert (made["max_token_num"], made["dtype"]) == (16, torch.bfloat16)
    assert made["group"].startswith("gloo for 0:02")  # not the default group, which would wait for ever
    assert api.runs == [1, 16]
    api.runs.clear()
    reference = TensorGroup(0, 2)
    group._fused = one_kernel
    for rows in (1, 16, 17, 0):
        x, residual, weight = given(rows)
        expected = reference.sum_add_norm(x.clone(), residual.clone(), weight, 1e-6)
        for ours, theirs in zip(group.sum_add_norm(x, residual, weight, 1e-6), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2**-6, atol=2**-6)
    assert api.runs == [1, 16]  # larger steps and empty ones go the other way


@pytest.mark.parametrize("fault", ["set-up", "launch", "numbers", "nan"])
def test_what_fails_or_gives_something_else_is_left_out(group: TensorGroup, fault: str) -> None:
    api = FakeComm(fault)
    assert fused.build(api, group, **SIZES) is None


def test_one_rank_that_cannot_leaves_all_without(group: TensorGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "least", lambda number: 0)
    assert fused.build(FakeComm(), group, **SIZES) is None


def test_where_it_is_not_even_looked_for(group: TensorGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_import_comm", lambda: pytest.fail("looked for"))
    cuda = torch.device("cuda")
    sizes: dict[str, Any] = {"hidden": HIDDEN, "dtype": torch.bfloat16}
    assert fused.fused_sum(group, one_machine=True, device=CPU, **sizes) is None
    assert fused.fused_sum(group, one_machine=False, device=cuda, **sizes) is None
    assert fused.fused_sum(group, one_machine=True, device=cuda, **{**sizes, "dtype": torch.float32}) is None


def test_how_many_tokens_a_workspace_has_room_for() -> None:
    assert fused.token_limit(2, 4096, torch.bfloat16) == 2048
    assert fused.token_limit(8, 8192, torch.float16) == 256
    assert fused.token_limit(2, 64, torch.bfloat16) == fused.MAX_TOKENS
    for ranks, hidden, dtype in ((3, 4096, torch.bfloat16), (2, 100, torch.bfloat16), (2, 4096, torch.float32)):
        assert fused.token_limit(ranks, hidden, dtype) == 0
    assert fused.token_limit(16, 4096, torch.bfloat16) == 0
