"""Layers alone: packed and tiled linear products, norm, rotation."""

from __future__ import annotations

import pytest
import torch

from services.gpu_worker.layers import linear as linear_module
from services.gpu_worker.layers.linear import ROW_TILE, Linear
from services.gpu_worker.layers.norm import fused_rms_norm, rms_norm
from services.gpu_worker.layers.rotary import RopeConfig, Rotary, rotate


def make_linear(dtype: torch.dtype, *, bias: bool, outputs: int = 96, inputs: int = 64) -> Linear:
    generator = torch.Generator().manual_seed(1)
    layer = Linear.empty(outputs, inputs, bias=bias, dtype=dtype, device=torch.device("cpu"))
    layer.weight.copy_(torch.randn((outputs, inputs), generator=generator))
    if layer.bias is not None:
        layer.bias.copy_(torch.randn(outputs, generator=generator))
    return layer


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_prepared_products_equal_plain_ones(dtype: torch.dtype, bias: bool, deterministic: bool) -> None:
    layer = make_linear(dtype, bias=bias)
    weight, offset = layer.weight.double(), layer.bias
    layer.prepare(deterministic=deterministic)
    for rows in (0, 1, 2, ROW_TILE, ROW_TILE + 1, 50):
        x = torch.randn((rows, 64), generator=torch.Generator().manual_seed(rows)).to(dtype)
        expected = x.double() @ weight.T + (0 if offset is None else offset.double())
        assert layer(x).dtype is dtype
        torch.testing.assert_close(
            layer(x).double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-2 if dtype.itemsize == 2 else 1e-4
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deterministic_rows_keep_their_bits(dtype: torch.dtype) -> None:
    layer = make_linear(dtype, bias=True, outputs=200, inputs=576)
    layer.prepare(deterministic=True)
    x = torch.randn((40, 576), generator=torch.Generator().manual_seed(2)).to(dtype)
    together = layer(x)
    assert torch.equal(torch.cat([layer(row[None]) for row in x]), together)
    assert torch.equal(layer(x.flip(0)).flip(0), together)


def test_a_product_whose_rows_depend_on_each_other_is_taken_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def entangled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(x.shape[0])
        return x @ weight.T + x.sum()

    monkeypatch.setattr(linear_module.F, "linear", entangled)
    layer = make_linear(torch.float32, bias=False)
    layer.prepare(deterministic=True)
    seen.clear()
    layer(torch.ones((5, 64)))
    assert seen == [1] * 5


def test_norm_rounds_before_its_weight() -> None:
    x = torch.randn((3, 64), generator=torch.Generator().manual_seed(3)).bfloat16()
    weight = torch.linspace(0.5, 2.0, 64).bfloat16()
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), weight * normed.bfloat16(), rtol=2**-7, atol=0)


@pytest.mark.parametrize("shape", [(64,), (4, 64)])
def test_the_norm_of_gpus_is_the_same_up_to_rounding(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(4)
    wide = torch.randn((3, 6, 64), generator=generator).bfloat16()
    x = wide[:, :4] if len(shape) == 2 else wide[:, 0]  # heads are slices of a fused product
    weight = torch.rand(shape, generator=generator).bfloat16() + 0.5
    torch.testing.assert_close(fused_rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5), rtol=2**-6, atol=0)
    exact = fused_rms_norm(x.float(), weight.float(), 1e-5)
    torch.testing.assert_close(exact, rms_norm(x.float(), weight.float(), 1e-5))


def test_rotation_preserves_length_and_depends_on_distance_only() -> None:
    rope = RopeConfig("default", 10_000.0, 16, 256)
    rotary = Rotary(rope, 256, torch.device("cpu"), deterministic=False)
    q, k = (torch.randn((1, 2, 16), generator=torch.Generator().manual_seed(seed)) for seed in (4, 5))

    def score(query_position: int, key_position: int) -> torch.Tensor:
        turned = [rotate(x, rotary.tables(torch.tensor([p]))) for x, p in ((q, query_position), (k, key_position))]
        torch.testing.assert_close(turned[0].norm(dim=-1), q.norm(dim=-1))
        return (turned[0] * turned[1]).sum(-1)

    torch.testing.assert_close(score(7, 3), score(104, 100), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(score(7, 3), score(7, 4))
