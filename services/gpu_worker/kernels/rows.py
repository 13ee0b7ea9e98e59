"""Row-wise kernels as functions of torch tensors: RMS norm with residual, rotary embedding, gated activation.

CPU tensors of fp32 or bf16 whose last axis is contiguous; rows may be strided. Leaves matrix products to
layers/packed_linear.py. `kernels` is the loaded library.
"""

from __future__ import annotations

import torch

from services.gpu_worker.kernels.library import DTYPES, GateCall, Library, NormCall, RopeCall


def rms_norm(
    kernels: Library, x: torch.Tensor, weight: torch.Tensor, eps: float, added: torch.Tensor | None = None
) -> torch.Tensor:
    """RMS norm of x [rows, n] by weight [n]. With `added` [rows, n] it is of x + added, which replaces x."""
    _check(x, weight, *(() if added is None else (added,)))
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    call = NormCall(
        x.data_ptr(),
        None if added is None else added.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        x.stride(0),
        0 if added is None else added.stride(0),
        out.stride(0),
        eps,
        x.shape[0],
        x.shape[1],
        DTYPES[x.dtype],
        torch.get_num_threads(),
    )
    kernels.functions.rf_norm(kernels.isa_id, call)
    return out


def rotate(kernels: Library, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate q [T, Hq, D] and k [T, Hkv, D] in place; cos and sin are fp32 [T, D / 2] with equal strides.

    Heads of a token lie next to each other; tokens may be strided (slices of a fused projection).
    """
    _check(q, k)
    if any(t.stride(1) != t.shape[2] and t.shape[1] > 1 for t in (q, k)) or cos.stride() != sin.stride():
        raise ValueError("heads of a token must be contiguous, cos and sin laid out alike")
    if cos.dtype != torch.float32 or cos.stride(1) != 1 or cos.shape != (q.shape[0], q.shape[2] // 2):
        raise ValueError(f"cos {tuple(cos.shape)} does not fit q {tuple(q.shape)}")
    call = RopeCall(
        q.data_ptr(),
        k.data_ptr(),
        cos.data_ptr(),
        sin.data_ptr(),
        q.stride(0),
        k.stride(0),
        cos.stride(0),
        q.shape[0],
        q.shape[1],
        k.shape[1],
        q.shape[2],
        DTYPES[q.dtype],
        torch.get_num_threads(),
    )
    kernels.functions.rf_rope(kernels.isa_id, call)


def silu_and_mul(kernels: Library, x: torch.Tensor) -> torch.Tensor:
    """silu(x[:, :n]) * x[:, n:] for x [rows, 2n]; [rows, n]."""
    _check(x)
    size = x.shape[1] // 2
    out = x.new_empty((x.shape[0], size))
    call = GateCall(
        x.data_ptr(),
        out.data_ptr(),
        x.stride(0),
        out.stride(0),
        x.shape[0],
        size,
        DTYPES[x.dtype],
        torch.get_num_threads(),
    )
    kernels.functions.rf_gate(kernels.isa_id, call)
    return out


def _check(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.dtype not in DTYPES or tensor.dtype != tensors[0].dtype:
            raise ValueError(f"no row kernel for {tensor.dtype} on {tensor.device.type}")
        if tensor.stride(-1) != 1:
            raise ValueError("the last axis must be contiguous")
