"""Products over int8 weights against float64 over the same weights, on every instruction set that runs here."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from services.gpu_worker.kernels import library
from services.gpu_worker.layers.packed_linear import PackedLinear
from services.gpu_worker.models.config import ModelError
from tests.gpu_worker.tiny_models import Sequence, Session, load, random_tokens, save_model

LIBRARY = library.load()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(params=library.available_isas(LIBRARY.functions))
def kernels(request: pytest.FixtureRequest) -> library.Library:
    return library.Library(LIBRARY.functions, request.param)


def quantised(weight: torch.Tensor) -> torch.Tensor:
    """What the kernels keep of a weight, in float64."""
    wide = weight.float()
    most = wide.abs().amax(1, keepdim=True)
    inverse = torch.full_like(most, 127).div(most)  # 127 / most would multiply by a rounded reciprocal
    return (torch.round(wide * inverse) * (most / 127)).double()


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    finite = bool(torch.isfinite(actual).all())
    return finite and (actual.double() - expected).abs().max().item() < tolerance * expected.abs().max().item()


@DTYPES
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 31, 33, 64, 100])
def test_int8_row_counts(kernels: library.Library, dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    weight, x = draw(112, 192, dtype=dtype), draw(rows, 192, dtype=dtype)
    out = PackedLinear(kernels, weight, int8=True)(x, float32=True)
    assert close(out, x.double() @ quantised(weight).T, 1e-4)


@DTYPES
@pytest.mark.parametrize("seed", range(8))
def test_int8_odd_shapes(kernels: library.Library, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    outputs, inputs, rows = random.randrange(1, 150), random.randrange(1, 300), random.randrange(1, 70)
    weight, bias, x = draw(outputs, inputs, dtype=dtype), draw(outputs, dtype=dtype), draw(rows, inputs, dtype=dtype)
    poisoned = torch.full((rows + 2, outputs + 3), math.nan)
    out = PackedLinear(kernels, weight, bias, int8=True)(x, out=poisoned[1:-1, 1:-2], float32=True)
    assert close(out, x.double() @ quantised(weight).T + bias.double(), 1e-4)
    assert int(torch.isnan(poisoned).sum()) == poisoned.numel() - rows * outputs


@DTYPES
def test_int8_with_norm_gate_and_zeros(kernels: library.Library, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, norm, x = draw(2 * 40, 128, dtype=dtype), draw(128, dtype=dtype), draw(20, 128, dtype=dtype)
    x[3] = 0
    normed = ((x.float() * torch.rsqrt(x.float().square().mean(1, keepdim=True) + 1e-5)).to(dtype) * norm).double()
    gate, up = (normed @ quantised(weight).T).chunk(2, 1)
    out = PackedLinear(kernels, weight, gated=True, int8=True)(x, norm=norm, eps=1e-5)
    assert close(out, F.silu(gate) * up, 1e-2)
    assert not out[3].any()


def test_one_large_value_leaves_the_others_their_digits(kernels: library.Library) -> None:
    weight, x = draw(64, 128, dtype=torch.float32), draw(1, 128, dtype=torch.float32)
    x[0, 5] = 1000.0
    expected = x.double() @ quantised(weight).T
    out = PackedLinear(kernels, weight, int8=True)(x)
    assert (out.double() - expected).abs().max().item() < 0.5 * 128**0.5 * 1000 / 32639 * 4


@DTYPES
@pytest.mark.parametrize("threads", [1, 2])
def test_an_int8_row_does_not_depend_on_the_others(kernels: library.Library, dtype: torch.dtype, threads: int) -> None:
    layer, x = PackedLinear(kernels, draw(200, 320, dtype=dtype), int8=True), draw(70, 320, dtype=dtype)
    expected, before = layer(x), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for rows in (1, 2, 3, 8, 9, 16, 17, 32, 33, 69):
            assert torch.equal(layer(x[-rows:]), expected[-rows:])
    finally:
        torch.set_num_threads(before)


def test_int8_nan_and_infinity_stay_in_their_row(kernels: library.Library) -> None:
    layer, x = PackedLinear(kernels, draw(64, 96, dtype=torch.bfloat16), int8=True), draw(4, 96, dtype=torch.bfloat16)
    clean = layer(x)
    x[1, 3], x[2, 70] = math.nan, math.inf
    out = layer(x)
    assert not torch.isfinite(out[1]).any()
    assert not torch.isfinite(out[2]).any()
    assert torch.equal(out[[0, 3]], clean[[0, 3]])


@pytest.mark.parametrize("isa", library.available_isas(LIBRARY.functions))
@pytest.mark.parametrize("name", ["llama", "qwen3", "llama-tied"])
def test_a_whole_model_in_int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, isa: str, name: str) -> None:
    """Near the unquantised one, and a chunked prompt gives the bits of a whole one."""
    monkeypatch.setenv(library.ISA_VARIABLE, isa)
    save_model(name, tmp_path)
    tokens = random_tokens(24, seed=1)

    def logits(counts: tuple[int, ...], **options: str) -> torch.Tensor:
        session, sequence = Session(load(tmp_path, attention_backend="native", **options)), Sequence(tokens)
        return torch.cat([session.step([(sequence, count)]) for count in counts])

    plain, whole, chunked = logits((24,)), logits((24,), quantization="int8"), logits((7, 1, 16), quantization="int8")
    assert torch.equal(whole[-1], chunked[-1])
    assert not torch.equal(whole, plain)
    assert (whole - plain).abs().max() < 0.1 * plain.abs().max()


def test_int8_is_refused_where_no_kernel_runs(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    with pytest.raises(ModelError, match="int8"):
        load(tmp_path, attention_backend="reference", quantization="int8")
    with pytest.raises(ModelError, match="int8"):
        load(tmp_path, model_impl="transformers", quantization="int8")
