"""Norm, rotary and gate kernels against float64, on every instruction set that runs here."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from services.gpu_worker.kernels import library, rows

LIBRARY = library.load()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}


@pytest.fixture(params=library.available_isas(LIBRARY.functions))
def kernels(request: pytest.FixtureRequest) -> library.Library:
    return library.Library(LIBRARY.functions, request.param)


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    error = (actual.double() - expected).abs() / expected.abs().clamp(min=1)
    return error.max().item() < TOLERANCE[actual.dtype]


@DTYPES
@pytest.mark.parametrize("size", [1, 7, 16, 33, 64, 576])
@pytest.mark.parametrize("count", [1, 5])
def test_norm(kernels: library.Library, dtype: torch.dtype, size: int, count: int) -> None:
    x, weight = draw(count, size + 3, dtype=dtype)[:, :size], draw(size, dtype=dtype)
    before = x.clone()
    normed = (x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-6)).to(dtype)
    out = rows.rms_norm(kernels, x, weight, 1e-6)
    assert close(out, normed.double() * weight.double())
    assert torch.equal(x, before)


@DTYPES
def test_norm_of_a_sum(kernels: library.Library, dtype: torch.dtype) -> None:
    x, added, weight = draw(6, 70, dtype=dtype), draw(6, 70, dtype=dtype), draw(70, dtype=dtype)
    total = x + added
    out = rows.rms_norm(kernels, x, weight, 1e-5, added)
    assert torch.equal(x, total)
    normed = (total.double() * torch.rsqrt(total.double().square().mean(1, keepdim=True) + 1e-5)).to(dtype)
    assert close(out, normed.double() * weight.double())


@DTYPES
@pytest.mark.parametrize("dim", [2, 10, 16, 64, 80, 128])
def test_rotate(kernels: library.Library, dtype: torch.dtype, dim: int) -> None:
    fused = draw(9, 7, dim, dtype=dtype)
    before, (q, k, v) = fused.clone(), fused.split([4, 2, 1], dim=1)
    angles = torch.rand(9, dim // 2) * 100
    cos, sin = angles.cos(), angles.sin()
    rows.rotate(kernels, q, k, cos, sin)
    first, second = before[:, :6].double().chunk(2, -1)
    c, s = cos[:, None].double(), sin[:, None].double()
    assert close(fused[:, :6], torch.cat([first * c - second * s, second * c + first * s], -1))
    assert torch.equal(v, before[:, 6:])


@DTYPES
@pytest.mark.parametrize("size", [1, 16, 45, 512])
def test_gate(kernels: library.Library, dtype: torch.dtype, size: int) -> None:
    x = draw(5, 2 * size, dtype=dtype) * 4
    x[0, 0], x[1, 0] = 200, -200
    gate, up = x.double().chunk(2, 1)
    assert close(rows.silu_and_mul(kernels, x), F.silu(gate) * up)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        rows.silu_and_mul(LIBRARY, torch.zeros(2, 4, dtype=torch.float16))
    with pytest.raises(ValueError, match="last axis"):
        rows.rms_norm(LIBRARY, torch.zeros(4, 2).T, torch.ones(4), 1e-6)
    with pytest.raises(ValueError, match="cos"):
        rows.rotate(LIBRARY, torch.zeros(2, 1, 4), torch.zeros(2, 1, 4), torch.zeros(2, 1), torch.zeros(2, 1))
