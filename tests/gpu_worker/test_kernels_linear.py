"""The packed product against float64, on every instruction set that runs here."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F

from services.gpu_worker.kernels import NativeUnavailable, library
from services.gpu_worker.kernels.logits import Blocks, blocks_of
from services.gpu_worker.layers.packed_linear import PackedLinear

LIBRARY = library.load()
ISAS = library.available_isas(LIBRARY.functions)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.fixture(params=ISAS)
def kernels(request: pytest.FixtureRequest) -> library.Library:
    return library.Library(LIBRARY.functions, request.param)


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    scale = max(1.0, expected.abs().max().item())
    return (
        bool(torch.isfinite(actual).all())
        and (actual.double() - expected).abs().max().item() < TOLERANCE[dtype] * scale
    )


@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 48, 63, 100, 128])
def test_row_counts(kernels: library.Library, dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    weight, x = draw(112, 96, dtype=dtype), draw(rows, 96, dtype=dtype)
    assert close(PackedLinear(kernels, weight)(x), x.double() @ weight.double().T, dtype)


@DTYPES
@pytest.mark.parametrize("seed", range(10))
def test_odd_shapes(kernels: library.Library, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    outputs, inputs, rows = random.randrange(1, 150), 2 * random.randrange(1, 120), random.randrange(1, 70)
    weight, bias, x = draw(outputs, inputs, dtype=dtype), draw(outputs, dtype=dtype), draw(rows, inputs, dtype=dtype)
    expected = x.double() @ weight.double().T + bias.double()
    poisoned = torch.full((rows + 2, outputs + 3), math.nan, dtype=dtype)
    out = PackedLinear(kernels, weight, bias)(x, out=poisoned[1:-1, 1:-2])
    assert close(out, expected, dtype)
    assert torch.isnan(poisoned[0]).all()
    assert torch.isnan(poisoned[-1]).all()
    assert torch.isnan(poisoned[:, 0]).all()
    assert torch.isnan(poisoned[:, -2:]).all()


@DTYPES
def test_float32_results(kernels: library.Library, dtype: torch.dtype) -> None:
    weight, x = draw(70, 64, dtype=dtype), draw(3, 64, dtype=dtype)
    out = PackedLinear(kernels, weight)(x, float32=True)
    assert out.dtype == torch.float32
    assert close(out, x.double() @ weight.double().T, torch.float32)


@DTYPES
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("rows", "outputs"), [(1, 70), (7, 320), (33, 33), (40, 1), (70, 200)])
def test_blocks_beside_the_product(
    kernels: library.Library, dtype: torch.dtype, int8: bool, rows: int, outputs: int
) -> None:
    """What is noted is what reading the results finds, with NaN and infinity as well; nothing beside it is written."""
    torch.manual_seed(rows)
    weight, x = draw(outputs, 64, dtype=dtype), draw(rows, 64, dtype=dtype)
    x[rows // 2, 3] = math.nan
    x[-1, 5] = math.inf
    layer, scales = PackedLinear(kernels, weight, int8=int8), torch.rand(rows).round(decimals=1)
    room = Blocks.empty(kernels, rows + 1, outputs + 64)
    room.peaks.fill_(7)
    room.sums.fill_(7)
    room.scales[:rows] = scales
    width = blocks_of(outputs)
    blocks = Blocks(kernels, room.peaks[:-1, :width], room.sums[:-1, :width], room.scales[:-1])
    out = layer(x, float32=True, blocks=blocks)
    assert torch.equal(out.nan_to_num(9), layer(x, float32=True).nan_to_num(9))
    found = Blocks.of(kernels, out, scales)
    assert torch.equal(blocks.peaks.nan_to_num(9), found.peaks.nan_to_num(9))
    summed = scales > 0
    assert torch.equal(blocks.sums[summed].nan_to_num(9), found.sums[summed].nan_to_num(9))
    for held in (room.peaks, room.sums):
        assert (held[-1] == 7).all()
        assert (held[:, width:] == 7).all()
    with pytest.raises(ValueError, match="blocks"):
        layer(x, float32=True, blocks=room)


@DTYPES
@pytest.mark.parametrize(("half", "rows"), [(48, 3), (40, 17), (7, 40)])
def test_gate(kernels: library.Library, dtype: torch.dtype, half: int, rows: int) -> None:
    torch.manual_seed(half)
    weight, bias, x = draw(2 * half, 64, dtype=dtype), draw(2 * half, dtype=dtype), draw(rows, 64, dtype=dtype)
    gate, up = (x.double() @ weight.double().T + bias.double()).chunk(2, 1)
    assert close(PackedLinear(kernels, weight, bias, gated=True)(x), F.silu(gate) * up, dtype)


@DTYPES
@pytest.mark.parametrize("rows", [1, 20, 40])
def test_norm_and_residual(kernels: library.Library, dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    weight, norm = draw(50, 90, dtype=dtype), draw(90, dtype=dtype)
    fused = draw(rows, 90 + 11, dtype=dtype)
    x, residual = fused[:, :90], draw(rows, 50, dtype=dtype)
    before = fused.clone()
    normed = (x.double() * torch.rsqrt(x.double().square().mean(1, keepdim=True) + 1e-5)).to(dtype)
    expected = (normed * norm).double() @ weight.double().T + residual.double()
    out = PackedLinear(kernels, weight)(x, norm=norm, eps=1e-5, residual=residual, out=residual)
    assert out is residual
    assert close(out, expected, dtype)
    assert torch.equal(fused, before)


@DTYPES
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_does_not_depend_on_the_others(kernels: library.Library, dtype: torch.dtype, threads: int) -> None:
    weight, x = draw(200, 320, dtype=dtype), draw(70, 320, dtype=dtype)
    layer, before = PackedLinear(kernels, weight), torch.get_num_threads()
    expected = layer(x)
    try:
        torch.set_num_threads(threads)
        for rows in (1, 2, 3, 16, 17, 32, 33, 69):
            assert torch.equal(layer(x[-rows:]), expected[-rows:])
    finally:
        torch.set_num_threads(before)


def test_nan_and_infinity_stay_in_their_row(kernels: library.Library) -> None:
    weight, x = draw(64, 64, dtype=torch.bfloat16), draw(4, 64, dtype=torch.bfloat16)
    x[1, 3], x[2, 5] = math.nan, math.inf
    out = PackedLinear(kernels, weight)(x)
    assert torch.isnan(out[1]).all()
    assert not torch.isfinite(out[2]).any()
    assert torch.isfinite(out[0]).all()
    assert torch.isfinite(out[3]).all()


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(NativeUnavailable):
        PackedLinear(LIBRARY, torch.zeros(4, 4, dtype=torch.float16))
    with pytest.raises(NativeUnavailable):
        PackedLinear(LIBRARY, torch.zeros(4, 3, dtype=torch.bfloat16))
    layer = PackedLinear(LIBRARY, torch.zeros(4, 6))
    with pytest.raises(ValueError):
        layer(torch.zeros(2, 5))
    with pytest.raises(ValueError):
        layer(torch.zeros(2, 6), out=torch.zeros(3, 4))
