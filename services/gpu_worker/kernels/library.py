"""Loads the kernel library and chooses the instruction set. Leaves building to build.py, tensors to the callers.

RADIXFLEET_CPU_ISA (portable, avx2, avx512, amx) forces a path; without it the best one this processor runs is taken.
RADIXFLEET_KERNEL_FLAGS adds compiler flags, for builds with sanitizers.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Mapping
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from dataclasses import dataclass

import torch

from services.gpu_worker.kernels import NativeUnavailable
from services.gpu_worker.kernels.build import library_path

ISAS = {"portable": 0, "avx2": 1, "avx512": 2, "amx": 3}
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
WEIGHT_FORMS = {**DTYPES, torch.int8: 2}
ISA_VARIABLE = "RADIXFLEET_CPU_ISA"
FLAGS_VARIABLE = "RADIXFLEET_KERNEL_FLAGS"


class LayerCall(ctypes.Structure):
    """One layer's attention inputs; mirrors LayerCall of interface.h. Strides in elements per token."""

    _fields_ = (
        ("q", c_void_p),
        ("k", c_void_p),
        ("v", c_void_p),
        ("out", c_void_p),
        ("cache", c_void_p),
        ("q_stride", c_int64),
        ("k_stride", c_int64),
        ("v_stride", c_int64),
        ("out_stride", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("window", c_int32),
    )


class BlockTable(ctypes.Structure):
    """What is known of logits; mirrors Blocks of interface.h. The stride is in elements."""

    _fields_ = (*((name, c_void_p) for name in ("peaks", "sums", "scales")), ("stride", c_int64))


class LinearCall(ctypes.Structure):
    """A product over packed weights; mirrors LinearCall of interface.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "weight", "norm", "residual", "bias", "out")),
        ("blocks", BlockTable),
        *((name, c_int64) for name in ("x_stride", "residual_stride", "out_stride")),
        ("eps", c_float),
        *(
            (name, c_int32)
            for name in ("rows", "outputs", "inputs", "dtype", "out_dtype", "gated", "threads", "weights")
        ),
    )


class NormCall(ctypes.Structure):
    """An RMS norm with residual; mirrors NormCall of interface.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "added", "weight", "out")),
        *((name, c_int64) for name in ("x_stride", "added_stride", "out_stride")),
        ("eps", c_float),
        *((name, c_int32) for name in ("rows", "size", "dtype", "threads")),
    )


class RopeCall(ctypes.Structure):
    """Rotary embedding of q and k in place; mirrors RopeCall of interface.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "cos", "sin")),
        *((name, c_int64) for name in ("q_stride", "k_stride", "table_stride")),
        *((name, c_int32) for name in ("tokens", "q_heads", "kv_heads", "head_dim", "dtype", "threads")),
    )


class GateCall(ctypes.Structure):
    """silu(gate) * up; mirrors GateCall of interface.h."""

    _fields_ = (
        ("x", c_void_p),
        ("out", c_void_p),
        ("x_stride", c_int64),
        ("out_stride", c_int64),
        *((name, c_int32) for name in ("rows", "size", "dtype", "threads")),
    )


class BlockCall(ctypes.Structure):
    """Logits of which nothing is known yet; mirrors BlockCall of interface.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("blocks", BlockTable),
        ("stride", c_int64),
        *((name, c_int32) for name in ("count", "vocab", "threads")),
    )


class EditCall(ctypes.Structure):
    """Edits of few logits; mirrors EditCall of interface.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("blocks", BlockTable),
        *((name, c_void_p) for name in ("slots", "positions", "keeps_stops")),
        *((name, c_void_p) for name in ("seen", "biased", "stops", "counts", "biases")),
        *((name, c_void_p) for name in ("num_seen", "num_biased", "num_stops", "stops_from")),
        *((name, c_void_p) for name in ("repetition", "frequency", "presence")),
        ("stride", c_int64),
        *((name, c_int32) for name in ("count", "vocab", "threads")),
    )


class MaskCall(ctypes.Structure):
    """Bitmasks over logits; mirrors MaskCall of interface.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("blocks", BlockTable),
        *((name, c_void_p) for name in ("words", "rows", "likeliest")),
        *((name, c_int64) for name in ("stride", "word_stride")),
        *((name, c_int32) for name in ("count", "vocab", "threads")),
    )


class ScoreCall(ctypes.Structure):
    """Norms and largest logits of rows; mirrors ScoreCall of interface.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("blocks", BlockTable),
        *((name, c_void_p) for name in ("targets", "norms", "chosen", "values", "tokens")),
        ("stride", c_int64),
        *((name, c_int32) for name in ("count", "vocab", "top", "threads")),
    )


class DrawCall(ctypes.Structure):
    """Tokens drawn from logits; mirrors DrawCall of interface.h."""

    _fields_ = (
        ("logits", c_void_p),
        ("blocks", BlockTable),
        *((name, c_void_p) for name in ("greedy", "temperatures", "top_p", "min_p", "top_k")),
        *((name, c_void_p) for name in ("seeds", "slots", "positions", "tokens", "peaks", "scratch")),
        ("stride", c_int64),
        *((name, c_int32) for name in ("count", "vocab", "num_slots", "threads")),
    )


class DecoderLayer(ctypes.Structure):
    """One layer of a decoder; mirrors DecoderLayer of interface.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("input_norm", "mlp_norm", "qk_norm")),
        *((name, c_void_p) for name in ("qkv", "output", "gate_up", "down")),
        *((name, c_void_p) for name in ("qkv_bias", "output_bias", "gate_up_bias", "down_bias")),
        ("cache", c_void_p),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("window", c_int32),
        ("rope", c_int32),
    )


class DecoderCall(ctypes.Structure):
    """A whole step; mirrors DecoderCall of interface.h."""

    _fields_ = (
        ("layers", POINTER(DecoderLayer)),
        ("head", POINTER(LinearCall)),
        *((name, c_void_p) for name in ("embedding", "token_ids", "positions", "keep", "out", "cos", "sin")),
        ("eps", c_float),
        *((name, c_int32) for name in ("vocab", "table_rows", "num_layers", "num_keep", "tokens", "hidden")),
        *((name, c_int32) for name in ("intermediate", "q_heads", "kv_heads", "head_dim", "dtype", "threads")),
        ("weights", c_int32),
    )


_P = c_void_p
_SIGNATURES: dict[str, tuple[type | None, tuple[type, ...]]] = {
    "rf_has_isa": (c_int, (c_int,)),
    "rf_plan_new": (_P, ()),
    "rf_plan_free": (None, (_P,)),
    "rf_plan_make": (
        c_int,
        (
            *(_P, _P, _P, _P, c_int64, _P),  # the batch's arrays
            *(c_int, c_int, c_int, c_int, c_int, c_int, c_int64, c_int, c_int),  # its shape
            *(_P, _P, _P, c_int, c_int),  # groups
        ),
    ),
    "rf_plan_kv_bytes": (c_uint64, (_P,)),
    "rf_attention": (None, (c_int, _P, POINTER(LayerCall))),
    "rf_decoder": (c_int, (c_int, _P, POINTER(DecoderCall))),
    "rf_packed_bytes": (c_int64, (c_int, c_int, c_int, c_int)),
    "rf_pack_weight": (None, (_P, c_int, c_int, c_int, c_int, c_int, _P)),
    "rf_linear": (c_int, (c_int, POINTER(LinearCall))),
    "rf_norm": (None, (c_int, POINTER(NormCall))),
    "rf_rope": (None, (c_int, POINTER(RopeCall))),
    "rf_gate": (None, (c_int, POINTER(GateCall))),
    "rf_blocks": (None, (c_int, POINTER(BlockCall))),
    "rf_edit": (None, (c_int, POINTER(EditCall))),
    "rf_mask": (None, (c_int, POINTER(MaskCall))),
    "rf_score": (None, (c_int, POINTER(ScoreCall))),
    "rf_draw_floats": (c_int64, (c_int,)),
    "rf_draw": (c_int, (c_int, POINTER(DrawCall))),
    "rf_read_memory": (c_uint64, (_P, c_int64, c_int)),
    "rf_pin_threads": (c_int, (_P, c_int, c_int)),
    "rf_copy_pages": (c_int, (POINTER(_P), c_int, _P, _P, c_int, c_int64, c_int)),
}


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded functions and the instruction set to run them with."""

    functions: ctypes.CDLL
    isa: str

    @property
    def isa_id(self) -> int:
        return ISAS[self.isa]


def load(environ: Mapping[str, str] | None = None) -> Library:
    """Builds if needed and loads. Raises NativeUnavailable, and ValueError for a forced path that cannot run here."""
    environ = os.environ if environ is None else environ
    functions = _open(os.fspath(library_path(tuple(environ.get(FLAGS_VARIABLE, "").split()))))
    forced = environ.get(ISA_VARIABLE, "")
    if not forced:
        return Library(functions, available_isas(functions)[-1])
    if forced not in ISAS or not functions.rf_has_isa(ISAS[forced]):
        raise ValueError(f"{ISA_VARIABLE}={forced}: not one of {', '.join(available_isas(functions))}")
    return Library(functions, forced)


@functools.cache
def _open(path: str) -> ctypes.CDLL:
    try:
        functions = ctypes.CDLL(path)
    except OSError as error:
        raise NativeUnavailable(f"the kernel library does not load: {error}") from error
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    return functions


@functools.cache
def available_isas(functions: ctypes.CDLL) -> tuple[str, ...]:
    """The paths this processor and system run, the best one last."""
    return tuple(name for name, number in ISAS.items() if functions.rf_has_isa(number))
