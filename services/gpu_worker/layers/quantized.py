"""Products with weights of 8 or 4 bits, quantised when they are loaded; torch's own kernels do the work.

fp8    weights e4m3 with a scale per output; each token is put into e4m3 by its own scale
int4   weights of 4 bits with a scale and an offset per group of 128, 64 or 32 inputs; tokens stay what they are
Leaves which layers to the decoder, int8 on CPUs to `packed_linear`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
import torch.nn.functional as F

from services.gpu_worker.kv_cache import FP8_LIMIT, to_fp8

QuantizedForm = Literal["fp8", "int4"]
GROUPS = (128, 64, 32)
ROWS_AT_ONCE = 4096  # of a weight while it is quantised: bounds what that takes beside it
TRIAL_ROWS = 16
# Relative distance of a product to one with the rounded weights in fp32: rounding of tokens and sums stays below.
TRIAL_DISTANCE = {"fp8": 0.06, "int4": 0.02}
SMALLEST = 1e-12

Packed = tuple[torch.Tensor, torch.Tensor]


class CannotQuantize(ValueError):
    """The device, dtype or size is none that there is a kernel for; the message says which."""


class QuantizedProduct(Protocol):
    """x [rows, in] -> x W^T + bias, [rows, out] in x's dtype."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Fp8Product:
    """Weight [out, in] in e4m3, scales fp32 [1, out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        if weight.shape[0] % 16 or weight.shape[1] % 16:
            raise CannotQuantize(f"fp8 needs multiples of 16, not a weight of {tuple(weight.shape)}")
        self._weight, scales = _in_pieces(weight, fp8_rows)
        self._scales = scales.t().contiguous()
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """As QuantizedProduct."""
        if x.shape[0] == 0:
            return x.new_empty((0, self._weight.shape[0]))
        tokens, scales = fp8_rows(x)
        out = torch._scaled_mm(
            tokens, self._weight.t(), scale_a=scales, scale_b=self._scales, out_dtype=x.dtype, use_fast_accum=True
        )
        return out if self._bias is None else out + self._bias


class Int4Product:
    """Weight [out, in] in the layout of torch's 4-bit kernels, scales and offsets [in / group, out, 2]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._group = int4_group(weight.shape[1])
        self.outputs = weight.shape[0]
        if self.outputs % 16:
            raise CannotQuantize(f"int4 needs outputs in multiples of 16, not a weight of {tuple(weight.shape)}")
        codes, scales = _in_pieces(weight, lambda rows: int4_rows(rows, self._group))
        self._scales = scales.transpose(0, 1).contiguous()
        self._bias = bias
        if weight.device.type == "cpu":
            self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
            self._run = torch.ops.aten._weight_int4pack_mm_for_cpu
        else:
            pairs = codes[:, ::2] << 4 | codes[:, 1::2]
            self._packed = torch.ops.aten._convert_weight_to_int4pack(pairs, min(8, self._group // 16))
            self._run = torch.ops.aten._weight_int4pack_mm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """As QuantizedProduct."""
        if x.shape[0] == 0:
            return x.new_empty((0, self.outputs))
        out: torch.Tensor = self._run(x.contiguous(), self._packed, self._group, self._scales)
        return out if self._bias is None else out + self._bias


def fp8_rows(x: torch.Tensor) -> Packed:
    """[rows, n] -> the same in e4m3, and a scale per row, fp32 [rows, 1]."""
    scales = x.abs().amax(1, keepdim=True).float().clamp_min(SMALLEST) / FP8_LIMIT
    return to_fp8(x, scales), scales


def fp8_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What `fp8_rows` made, as fp32."""
    return codes.float() * scales


def int4_group(inputs: int) -> int:
    """The largest group that divides the inputs. Raises CannotQuantize."""
    for group in GROUPS:
        if inputs % group == 0:
            return group
    raise CannotQuantize(f"int4 needs inputs in multiples of {GROUPS[-1]}, not {inputs}")


def int4_rows(weight: torch.Tensor, group: int) -> Packed:
    """[rows, n] -> codes 0 .. 15, uint8 [rows, n], and scale and offset of each group, [rows, n / group, 2].

    A code c stands for (c - 8) * scale + offset, where scale and offset are rounded to the weight's dtype before the
    codes are chosen. The group's least and greatest weights are the ends of the scale.
    """
    groups = weight.float().view(weight.shape[0], -1, group)
    low, high = groups.aminmax(dim=-1, keepdim=True)
    scale = ((high - low) / 15).clamp_min(1e-6).to(weight.dtype).float()
    offset = (low + 8 * scale).to(weight.dtype).float()
    codes = ((groups - offset) / scale + 8).round().clamp(0, 15).to(torch.uint8)
    return codes.view_as(weight), torch.cat((scale, offset), -1).to(weight.dtype)


def int4_values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What `int4_rows` made, as fp32."""
    groups = codes.float().view(codes.shape[0], scales.shape[1], -1)
    return ((groups - 8) * scales[..., :1].float() + scales[..., 1:].float()).view(codes.shape)


def _in_pieces(weight: torch.Tensor, quantize: Callable[[torch.Tensor], Packed]) -> Packed:
    pieces = [quantize(rows) for rows in weight.split(ROWS_AT_ONCE)]
    return torch.cat([codes for codes, _ in pieces]), torch.cat([scales for _, scales in pieces])


class Quantizer:
    """Makes products of weights. The first one has to agree with its own rounded weights before any is trusted."""

    def __init__(self, form: QuantizedForm, device: torch.device, dtype: torch.dtype) -> None:
        """Raises CannotQuantize where `device` has no kernel for it."""
        reason = _obstacle(form, device, dtype)
        if reason is not None:
            raise CannotQuantize(reason)
        self.form = form
        self._trusted = False

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> QuantizedProduct:
        """weight [out, in], bias [out]. Raises CannotQuantize for a size without a kernel, or one that fails."""
        product = Fp8Product(weight, bias) if self.form == "fp8" else Int4Product(weight, bias)
        if not self._trusted:
            self._try(product, weight, bias)
            self._trusted = True
        return product

    def _try(self, product: QuantizedProduct, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn((TRIAL_ROWS, weight.shape[1]), generator=generator).to(weight)
        expected = F.linear(x.float(), rounded(self.form, weight), None if bias is None else bias.float())
        distance = float((product(x).float() - expected).norm() / expected.norm().clamp_min(SMALLEST))
        if not distance <= TRIAL_DISTANCE[self.form]:
            raise CannotQuantize(
                f"{self.form} products on {weight.device} are wrong (relative distance {distance:.2g})"
            )


def rounded(form: QuantizedForm, weight: torch.Tensor) -> torch.Tensor:
    """The weight as it is after quantising, fp32 [out, in]."""
    if form == "fp8":
        return fp8_values(*fp8_rows(weight))
    return int4_values(*int4_rows(weight, int4_group(weight.shape[1])))


def _obstacle(form: QuantizedForm, device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type == "cpu":
        return "--quantization fp8 needs a GPU; on a CPU there are int8 and int4" if form == "fp8" else None
    if dtype != torch.bfloat16:
        return f"--quantization {form} needs --dtype bfloat16 on a GPU, not {str(dtype).removeprefix('torch.')}"
    least = (8, 9) if form == "fp8" else (8, 0)
    capability = torch.cuda.get_device_capability(device)
    if capability < least:
        return (
            f"--quantization {form} needs a GPU of compute capability {least[0]}.{least[1]} or more, "
            f"this one has {capability[0]}.{capability[1]}"
        )
    return None
