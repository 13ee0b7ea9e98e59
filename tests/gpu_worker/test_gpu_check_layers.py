"""The device check of quantised products and experts runs, and says so where something is wrong."""

from __future__ import annotations

import pytest
import torch

from scripts.gpu_check import layers


def test_all_is_well_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert layers.main(["--device", "cpu", "--quick"]) == 0
    said = capsys.readouterr().out
    assert "fp8: --quantization fp8 needs a GPU" in said
    assert said.count("int4 64 x 128") == 2
    assert said.count("experts SortedExperts") == 2
    assert "WRONG" not in said
    assert said.splitlines()[-1].endswith("0 wrong")


def test_wrong_products_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = torch.ops.aten._weight_int4pack_mm_for_cpu
    monkeypatch.setattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu", lambda *given: right(*given).flip(1))
    assert layers.main(["--device", "cpu", "--quick"]) == 1
    assert "WRONG int4 64 x 128: int4 products on cpu are wrong" in capsys.readouterr().out


def test_experts_that_cannot_be_had_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert layers.main(["--device", "cpu", "--quick", "--moe-backend", "flashinfer"]) == 1
    assert "WRONG experts: --moe-backend flashinfer needs CUDA" in capsys.readouterr().out
