"""Weights of 8 and 4 bits: packing, products against the rounded weights, loading layer by layer, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from services.gpu_worker.layers import quantized
from services.gpu_worker.layers.linear import Linear
from services.gpu_worker.layers.quantized import (
    CannotQuantize,
    Fp8Product,
    Int4Product,
    QuantizedForm,
    Quantizer,
    fp8_rows,
    fp8_values,
    int4_group,
    int4_rows,
    int4_values,
    rounded,
)
from services.gpu_worker.models.config import ModelError
from services.gpu_worker.models.decoder import Decoder, DecoderLayer
from tests.gpu_worker.tiny_models import Sequence, Session, load, random_tokens, reference_logits, save_model

CPU = torch.device("cpu")
FORMS: tuple[QuantizedForm, ...] = ("fp8", "int4")


def weight_of(outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)) * 0.1).to(dtype)


def rows_of(rows: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)


def test_fp8_keeps_four_binary_digits_of_each_number() -> None:
    weight = weight_of(16, 64)
    weight[3] = 0.0
    weight[5] *= 1e4
    error = (fp8_values(*fp8_rows(weight)) - weight).abs()
    largest = weight.abs().amax(1, keepdim=True)
    assert (error <= weight.abs() / 16 + largest / 448 / 512).all()
    assert torch.equal(fp8_values(*fp8_rows(weight))[3], weight[3])


@pytest.mark.parametrize("group", [32, 64, 128])
def test_int4_is_within_half_a_sixteenth_of_the_range_of_a_group(group: int) -> None:
    weight = weight_of(16, 256)
    codes, scales = int4_rows(weight, group)
    assert codes.dtype == torch.uint8
    assert int(codes.max()) == 15
    assert scales.shape == (16, 256 // group, 2)
    groups = weight.view(16, -1, group)
    error = (int4_values(codes, scales).view_as(groups) - groups).abs()
    assert (error <= (groups.amax(-1) - groups.amin(-1))[..., None] / 30 + 1e-5).all()


def test_int4_groups_divide_the_inputs() -> None:
    assert [int4_group(inputs) for inputs in (4096, 576, 96)] == [128, 64, 32]
    with pytest.raises(CannotQuantize, match="multiples of 32, not 40"):
        int4_group(40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 7, 33])
def test_products_are_those_of_the_rounded_weights(dtype: torch.dtype, biased: bool, rows: int) -> None:
    weight, bias = weight_of(48, 96, dtype), rows_of(1, 48, dtype)[0] if biased else None
    x = rows_of(rows, 96, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    tokens = fp8_values(*fp8_rows(x)) if rows else x.float()
    for product, given in ((Int4Product(weight, bias), x.float()), (Fp8Product(weight, bias), tokens)):
        values = rounded("int4" if isinstance(product, Int4Product) else "fp8", weight)
        expected = F.linear(given, values, None if bias is None else bias.float())
        actual = product(x)
        assert actual.dtype == dtype
        assert actual.shape == (rows, 48)
        torch.testing.assert_close(actual.float(), expected, rtol=0, atol=tolerance)


def test_large_weights_are_quantised_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = weight_of(64, 64), rows_of(3, 64)
    whole = [Int4Product(weight, None)(x), Fp8Product(weight, None)(x)]
    monkeypatch.setattr(quantized, "ROWS_AT_ONCE", 24)
    assert torch.equal(Int4Product(weight, None)(x), whole[0])
    assert torch.equal(Fp8Product(weight, None)(x), whole[1])


def test_sizes_without_a_kernel_are_named() -> None:
    with pytest.raises(CannotQuantize, match=r"not a weight of \(40, 64\)"):
        Int4Product(weight_of(40, 64), None)
    with pytest.raises(CannotQuantize, match=r"not a weight of \(48, 40\)"):
        Fp8Product(weight_of(48, 40), None)


def test_a_kernel_with_wrong_results_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer = Quantizer("int4", CPU, torch.float32)
    right = torch.ops.aten._weight_int4pack_mm_for_cpu
    monkeypatch.setattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu", lambda *given: right(*given).flip(1))
    with pytest.raises(CannotQuantize, match="products on cpu are wrong"):
        quantizer(weight_of(32, 64), None)


def test_a_quantised_linear_has_no_plain_weight() -> None:
    linear = Linear.empty(32, 64, bias=True, dtype=torch.float32, device=torch.device("meta"))
    linear.place(CPU)
    linear.weight.copy_(weight_of(32, 64))
    assert linear.bias is not None
    linear.bias.zero_()
    linear.prepare(deterministic=False, quantize=Quantizer("int4", CPU, torch.float32))
    expected = F.linear(rows_of(5, 64), rounded("int4", weight_of(32, 64)))
    torch.testing.assert_close(linear(rows_of(5, 64)), expected)
    assert linear._weight is None


@pytest.mark.parametrize("name", ["llama-biased-silu", "qwen3", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_of_int4_is_the_model_of_its_rounded_weights(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model = save_model(name, tmp_path)
    tokens = random_tokens(37, seed=1)
    plain = reference_logits(model, tokens)
    model.to(dtype)
    for parameter_name, parameter in model.named_parameters():
        if "_proj.weight" in parameter_name:
            parameter.data = rounded("int4", parameter.data)
    expected = reference_logits(model.float(), tokens)
    loaded = load(tmp_path, quantization="int4", attention_backend="native", dtype=dtype)
    assert loaded.config.digest.endswith("-int4")
    session, sequence = Session(loaded), Sequence(tokens)
    logits = torch.cat([session.step([(sequence, count)]) for count in (7, 1, 29)])
    distance = float((logits - expected).norm() / expected.norm())
    assert distance < (1e-4 if dtype == torch.float32 else 0.05)
    assert float((logits - plain).norm() / plain.norm()) > distance, "it is the rounded model, not the one given"


def test_a_model_of_fp8_is_near_the_one_it_was_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "_obstacle", lambda *_given: None)  # torch's reference on a CPU is slow, but there
    model = save_model("llama-biased-silu", tmp_path)
    tokens = random_tokens(21, seed=1)
    logits = Session(load(tmp_path, quantization="fp8")).step([(Sequence(tokens), 21)])
    expected = reference_logits(model, tokens)
    assert 1e-3 < float((logits - expected).norm() / expected.norm()) < 0.25


def test_int4_is_deterministic_when_asked(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    loaded = load(tmp_path, quantization="int4", deterministic=True, attention_backend="native")
    prompts = [random_tokens(length, seed=length) for length in (5, 18)]
    together = Session(loaded).step([(Sequence(tokens), len(tokens)) for tokens in prompts])
    alone = [Session(loaded, seed=9).step([(Sequence(tokens), len(tokens))]) for tokens in prompts]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_no_two_layers_have_plain_weights_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, load_format: str
) -> None:
    placed: list[DecoderLayer] = []
    place = DecoderLayer.place

    def watched(layer: DecoderLayer, device: torch.device) -> None:
        assert all(linear._weight is None for earlier in placed for linear in earlier.linears())
        placed.append(layer)
        place(layer, device)

    monkeypatch.setattr(DecoderLayer, "place", watched)
    made: list[Decoder] = []
    finish = Decoder.finish_loading

    def noted(decoder: Decoder, *given: Any, **named: Any) -> None:
        made.append(decoder)
        finish(decoder, *given, **named)

    monkeypatch.setattr(Decoder, "finish_loading", noted)
    save_model("llama", tmp_path)
    load(tmp_path, quantization="int4", load_format=load_format)
    assert placed == made[0].layers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "fp8"}, "fp8 needs a GPU; on a CPU there are int8 and int4"),
        ({"quantization": "int4", "model_impl": "transformers"}, "--quantization int4 is for models of the own"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    save_model("llama", tmp_path)
    with pytest.raises(ModelError, match=message):
        load(tmp_path, **options)


def test_experts_and_odd_sizes_are_refused(tmp_path: Path) -> None:
    save_model("mixtral", tmp_path / "moe")
    with pytest.raises(ModelError, match="--quantization int4 is not for models with experts"):
        load(tmp_path / "moe", quantization="int4")
    save_model("llama", tmp_path / "odd", intermediate_size=40)
    for load_format in ("auto", "dummy"):
        with pytest.raises(ModelError, match=r"odd: int4 needs"):
            load(tmp_path / "odd", quantization="int4", load_format=load_format)


@pytest.mark.parametrize(
    ("form", "capability", "dtype", "message"),
    [
        ("fp8", (8, 0), torch.bfloat16, "compute capability 8.9 or more, this one has 8.0"),
        ("int4", (7, 5), torch.bfloat16, "compute capability 8.0 or more, this one has 7.5"),
        ("fp8", (9, 0), torch.float16, "needs --dtype bfloat16 on a GPU, not float16"),
    ],
)
def test_gpus_without_the_kernels_are_refused(
    monkeypatch: pytest.MonkeyPatch, form: QuantizedForm, capability: tuple[int, int], dtype: torch.dtype, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    with pytest.raises(CannotQuantize, match=message):
        Quantizer(form, torch.device("cuda"), dtype)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    assert Quantizer(form, torch.device("cuda"), torch.bfloat16).form == form
