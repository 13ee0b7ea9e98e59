"""A linear layer over weights packed once for the CPU's own kernels. Leaves the plain layer to `linear`."""

from __future__ import annotations

import torch

from services.gpu_worker.huge_memory import Arena
from services.gpu_worker.kernels import NativeUnavailable
from services.gpu_worker.kernels.library import DTYPES, WEIGHT_FORMS, BlockTable, Library, LinearCall
from services.gpu_worker.kernels.logits import Blocks

_weights = Arena()


class PackedLinear:
    """y = x W^T + b for weight [out, in], bias [out] or None; fp32 or bf16 on CPU.

    A row's result does not depend on the other rows or the number of threads: the same bits alone and in any batch.
    `int8`: the weight is kept as int8 with a scale per output; x stays what it is, with at least 16 bits.
    `gated`: the weight holds gate over up, and forward returns silu(gate) * up, [rows, out / 2].
    The weight is copied; the caller may drop its own. Raises NativeUnavailable for what the kernels cannot take.
    """

    def __init__(
        self,
        kernels: Library,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        gated: bool = False,
        int8: bool = False,
    ) -> None:
        outputs, inputs = weight.shape
        if weight.device.type != "cpu" or weight.dtype not in DTYPES:
            raise NativeUnavailable(f"no packed product for {weight.dtype} on {weight.device.type}")
        if weight.dtype == torch.bfloat16 and inputs % 2 and not int8:
            raise NativeUnavailable(f"no packed product for an odd number of inputs ({inputs})")
        if gated and outputs % 2:
            raise ValueError(f"gated weights come in halves, not {outputs} rows")
        self.dtype = weight.dtype
        self.form = torch.int8 if int8 else weight.dtype
        self.inputs = inputs
        self.outputs = outputs // 2 if gated else outputs
        self._run = kernels.functions.rf_linear
        self._isa = kernels.isa_id
        self._packed = _pack(kernels, weight, self.form, gated)
        self._bias = None if bias is None else _panel_order(bias, gated)
        self._call = LinearCall(
            weight=self._packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            outputs=outputs,
            inputs=inputs,
            dtype=DTYPES[weight.dtype],
            weights=WEIGHT_FORMS[self.form],
            gated=gated,
        )

    def forward(
        self,
        x: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        float32: bool = False,
        blocks: Blocks | None = None,
    ) -> torch.Tensor:
        """x [rows, in] -> [rows, out] in x's dtype, or fp32 when asked; not thread-safe.

        norm [in]: x is RMS-normalised by it first, x itself staying as it is. residual [rows, out]: added to the
        result; it may be `out` itself. blocks: is noted of the result, which is fp32.
        """
        dtype = torch.float32 if float32 else self.dtype
        if out is None:
            out = torch.empty((x.shape[0], self.outputs), dtype=dtype)
        self._describe(self._call, x, out, dtype, norm, eps, residual, blocks)
        if self._run(self._isa, self._call):
            raise MemoryError("no memory for a matrix product")
        return out

    def prepared(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        blocks: Blocks | None = None,
    ) -> LinearCall:
        """What `forward` would run for memory whose owner keeps it: for who runs it again and again, or in a step."""
        call = LinearCall.from_buffer_copy(self._call)
        self._describe(call, x, out, out.dtype, norm, eps, None, blocks)
        return call

    def _describe(
        self,
        call: LinearCall,
        x: torch.Tensor,
        out: torch.Tensor,
        dtype: torch.dtype,
        norm: torch.Tensor | None,
        eps: float,
        residual: torch.Tensor | None,
        blocks: Blocks | None,
    ) -> None:
        if x.dtype != self.dtype or x.shape[1] != self.inputs or x.stride(1) != 1:
            raise ValueError(f"x {tuple(x.shape)} of {x.dtype} does not fit {self.inputs} inputs of {self.dtype}")
        for tensor in (out, residual):
            if tensor is not None and (tensor.dtype != dtype or tensor.shape != out.shape or tensor.stride(1) != 1):
                raise ValueError("out and residual must have the result's shape and dtype")
        if out.shape != (x.shape[0], self.outputs) or (norm is not None and norm.dtype != self.dtype):
            raise ValueError("out or norm does not fit")
        call.blocks = BlockTable() if blocks is None else blocks.table(out)
        call.x, call.x_stride, call.rows = x.data_ptr(), x.stride(0), x.shape[0]
        call.out, call.out_stride, call.out_dtype = out.data_ptr(), out.stride(0), DTYPES[dtype]
        call.norm, call.eps = None if norm is None else norm.data_ptr(), eps
        call.residual = None if residual is None else residual.data_ptr()
        call.residual_stride = 0 if residual is None else residual.stride(0)
        call.threads = torch.get_num_threads()

    __call__ = forward

    @property
    def packed(self) -> int:
        """Address of the packed weight, for kernels that run several products in one call."""
        return self._packed.data_ptr()

    @property
    def packed_bias(self) -> int | None:
        return None if self._bias is None else self._bias.data_ptr()


def _pack(kernels: Library, weight: torch.Tensor, form: torch.dtype, gated: bool) -> torch.Tensor:
    functions, (outputs, inputs), weights = kernels.functions, weight.shape, WEIGHT_FORMS[form]
    packed = _weights.take(functions.rf_packed_bytes(outputs, inputs, weights, gated))
    weight, dtype = weight.contiguous(), DTYPES[weight.dtype]
    functions.rf_pack_weight(weight.data_ptr(), outputs, inputs, dtype, weights, gated, packed.data_ptr())
    return packed


def _panel_order(bias: torch.Tensor, gated: bool) -> torch.Tensor:
    """The bias as fp32 in the order of the packed panels of 16, padded with zeros to pairs of them."""
    halves = bias.float().chunk(2) if gated else (bias.float(),)
    multiple = 16 if gated else 32
    padded = [torch.nn.functional.pad(half, (0, -half.shape[0] % multiple)) for half in halves]
    return torch.stack([half.view(-1, 16) for half in padded], dim=1).reshape(-1).contiguous()
