"""Experts on a GPU, without a word to the host, so that a graph can hold them. Leaves the reference to `moe`.

flashinfer   one fused kernel; it is compiled when it is first wanted, which takes minutes
torch        rows sorted by expert, two grouped products
Whichever is taken has to agree with the reference on the first layer's weights before it is trusted.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, Literal

import structlog
import torch
import torch.nn.functional as F

from services.gpu_worker.attention.flashinfer_api import find_build_tool
from services.gpu_worker.layers.activation import ACTIVATIONS, gated
from services.gpu_worker.layers.moe import Experts, ExpertsMaker, SortedExperts

MoeBackend = Literal["auto", "flashinfer", "torch"]
FUSED_ROWS = 4096  # more tokens go through in pieces: the kernel's scratch grows with them
GROUPED_PAIRS = 16_384  # of a token and an expert at once, for the same reason
TRIAL_ROWS = 8
TRIAL_DISTANCE = 0.05  # relative; rounding stays below, another order of gate and up goes far beyond
_HALF_DTYPES = (torch.bfloat16, torch.float16)

log = structlog.get_logger(__name__)


class FusedExperts:
    """FlashInfer's fused experts; `module` has its functions. The weights are put into its order: up before gate."""

    def __init__(self, module: Any, gate_up: torch.Tensor, down: torch.Tensor, workspace: torch.Tensor) -> None:
        self._run = module.cutlass_fused_moe
        swap_halves(gate_up)
        self._gate_up, self._down = gate_up, down
        self._workspace = workspace

    def __call__(self, x: torch.Tensor, choice: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As Experts."""
        out = torch.empty_like(x)
        for start in range(0, x.shape[0], FUSED_ROWS):
            rows = slice(start, start + FUSED_ROWS)
            self._run(
                x[rows],
                choice[rows],
                weights[rows],
                self._gate_up,
                self._down,
                x.dtype,
                quant_scales=[],
                output=out[rows],
                use_fused_finalize=False,  # the other way adds up in an order that changes from run to run
                workspace_buffer=self._workspace,
            )
        return out

    @staticmethod
    def workspace(module: Any, gate_up: torch.Tensor, top_k: int) -> torch.Tensor:
        """Scratch for all layers of these sizes, one after the other. It compiles the kernel where that is due."""
        experts, columns, hidden = gate_up.shape
        size = module.cutlass_fused_moe_workspace_size(
            FUSED_ROWS,
            hidden,
            columns // 2,
            experts,
            top_k,
            x_dtype=gate_up.dtype,
            weight_dtype=gate_up.dtype,
            output_dtype=gate_up.dtype,
            use_fused_finalize=False,
            device=gate_up.device,
        )
        return torch.empty(size, dtype=torch.uint8, device=gate_up.device)


class GroupedExperts:
    """torch's grouped products over rows sorted by expert; sums in fp32 in the order of the choice."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, activation: str) -> None:
        self._gate_up, self._down = gate_up.transpose(1, 2), down.transpose(1, 2)
        self._numbers = torch.arange(gate_up.shape[0], dtype=torch.int32, device=gate_up.device)
        self._gated = partial(gated, activation=ACTIVATIONS[activation])

    def __call__(self, x: torch.Tensor, choice: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As Experts."""
        size = max(1, GROUPED_PAIRS // choice.shape[1])
        if x.shape[0] <= size:
            return self._piece(x, choice, weights)
        pieces = zip(x.split(size), choice.split(size), weights.split(size), strict=True)
        return torch.cat([self._piece(*piece) for piece in pieces])

    def _piece(self, x: torch.Tensor, choice: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, k = choice.shape
        chosen, order = choice.flatten().sort(stable=True)
        ends = torch.searchsorted(chosen, self._numbers, right=True, out_int32=True)
        mixed = self._gated(F.grouped_mm(x[order // k], self._gate_up, offs=ends))
        sorted_out = F.grouped_mm(mixed, self._down, offs=ends)
        out = torch.empty_like(sorted_out)
        out[order] = sorted_out
        return (out.view(tokens, k, x.shape[1]).float() * weights[..., None]).sum(1).to(x.dtype)


def swap_halves(gate_up: torch.Tensor) -> None:
    """[experts, 2n, hidden] in place, an expert at a time, so that no second copy of all exists."""
    for weight in gate_up:
        weight.copy_(weight.roll(weight.shape[0] // 2, 0))


class TrustedMaker:
    """An ExpertsMaker: the first of the candidates that agrees with the reference, for every layer the same one."""

    def __init__(self, candidates: dict[str, ExpertsMaker], top_k: int) -> None:
        self._candidates = candidates
        self._top_k = top_k
        self._tried = False

    def __call__(self, gate_up: torch.Tensor, down: torch.Tensor, activation: str) -> Experts | None:
        while self._candidates:
            name, make = next(iter(self._candidates.items()))
            if self._tried:
                return make(gate_up, down, activation)
            experts = self._try(name, make, gate_up, down, activation)
            if experts is not None:
                self._tried = True
                return experts
            del self._candidates[name]
        return None

    def _try(
        self, name: str, make: ExpertsMaker, gate_up: torch.Tensor, down: torch.Tensor, activation: str
    ) -> Experts | None:
        given = _trial(gate_up, self._top_k)
        expected = SortedExperts(gate_up, down, activation)(*given).float()
        before = gate_up[0].clone()
        try:
            experts = make(gate_up, down, activation)
            if experts is None:
                return None
            actual = experts(*given).float()
            distance = float((actual - expected).norm() / expected.norm().clamp_min(1e-30))
        except Exception as error:  # a kernel that cannot be compiled or does not take these sizes
            log.warning("experts: not available", backend=name, reason=f"{type(error).__name__}: {error}")
        else:
            if distance <= TRIAL_DISTANCE:
                log.info("experts", backend=name, distance=round(distance, 4))
                return experts
            log.warning("experts: wrong results", backend=name, distance=distance)
        if not torch.equal(before, gate_up[0]):
            swap_halves(gate_up)
        return None


def _trial(gate_up: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((TRIAL_ROWS, gate_up.shape[2]), generator=generator).to(gate_up)
    scores = torch.rand((TRIAL_ROWS, gate_up.shape[0]), generator=generator)
    weights, choice = (part.to(gate_up.device) for part in scores.topk(top_k))
    return x, choice.int(), weights


def experts_maker(backend: MoeBackend, device: torch.device, dtype: torch.dtype, top_k: int) -> ExpertsMaker | None:
    """What to run experts with on `device`; None: the reference. Raises ValueError where `backend` cannot be had."""
    if device.type != "cuda" or dtype not in _HALF_DTYPES:
        if backend == "flashinfer":
            raise ValueError("--moe-backend flashinfer needs CUDA, and bfloat16 or float16")
        return None
    candidates: dict[str, ExpertsMaker] = {}
    if backend == "flashinfer" or (backend == "auto" and _is_compiled(device)):
        candidates["flashinfer"] = _flashinfer(top_k)
    if backend != "flashinfer" and dtype == torch.bfloat16:
        candidates["torch"] = GroupedExperts
    return TrustedMaker(candidates, top_k)


def _flashinfer(top_k: int) -> ExpertsMaker:
    workspaces: list[torch.Tensor] = []

    def make(gate_up: torch.Tensor, down: torch.Tensor, activation: str) -> Experts | None:
        if activation not in ("silu", "swish"):
            return None
        find_build_tool()
        module = importlib.import_module("flashinfer.fused_moe")
        if not workspaces:
            workspaces.append(FusedExperts.workspace(module, gate_up, top_k))
        return FusedExperts(module, gate_up, down, workspaces[0])

    return make


def _is_compiled(device: torch.device) -> bool:
    """Whether FlashInfer has the kernel for this device already: a start does not wait minutes for a compiler."""
    major, minor = torch.cuda.get_device_capability(device)
    try:
        jit = importlib.import_module("flashinfer.jit.fused_moe")
        return bool(getattr(jit, f"gen_cutlass_fused_moe_sm{major}{minor}_module")().is_compiled)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        log.info("experts: no fused kernel of FlashInfer", reason=str(error))
        return False
