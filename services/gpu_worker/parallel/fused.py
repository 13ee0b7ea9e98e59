"""Sum over ranks, addition and norm as one kernel of FlashInfer. Leaves the reference, and which runs, to the group.

It writes into the other GPUs' memory and waits for them, so it is for the ranks of one machine, and for steps with
few tokens, where the time goes into starting kernels; larger ones are summed over NCCL.
"""

from __future__ import annotations

import atexit
import importlib
import math
from datetime import timedelta
from typing import Any, Protocol, cast

import structlog
import torch
import torch.distributed as dist

from services.gpu_worker.attention.flashinfer_api import find_build_tool
from services.gpu_worker.layers.norm import add_norm

RANKS = (2, 4, 8)
MAX_TOKENS = 2048
WORKSPACE_BYTES = 128 << 20
SETUP_TIMEOUT = timedelta(minutes=2)
"""While it is set up a rank that fails leaves the others waiting; without memory of each other they go on after it."""
TRIAL_DISTANCE = 0.02  # relative; rounding to bfloat16 stays below
TRIAL_EPS = 1e-5
_HALF_DTYPES = (torch.bfloat16, torch.float16)
_VECTOR = 8  # halves that a thread moves at once

log = structlog.get_logger(__name__)


class Ranks(Protocol):
    """The group, as far as it is needed here."""

    rank: int
    size: int

    def sum(self, x: torch.Tensor) -> torch.Tensor: ...

    def least(self, number: int) -> int: ...


class CommApi(Protocol):
    """The module `flashinfer.comm`, as far as we use it."""

    AllReduceFusionPattern: Any

    def create_allreduce_fusion_workspace(
        self,
        backend: str,
        *,
        world_size: int,
        rank: int,
        max_token_num: int,
        hidden_dim: int,
        dtype: torch.dtype,
        group: dist.ProcessGroup | None,
    ) -> Any: ...

    def allreduce_fusion(
        self,
        input: torch.Tensor,
        workspace: Any,
        pattern: int,
        *,
        residual_out: torch.Tensor,
        norm_out: torch.Tensor,
        residual_in: torch.Tensor,
        rms_gamma: torch.Tensor,
        rms_eps: float,
        fp32_acc: bool,
    ) -> torch.Tensor: ...


class FusedSum:
    """All ranks call it for the same steps: it waits on the device for theirs."""

    def __init__(self, api: CommApi, workspace: Any, max_tokens: int) -> None:
        self._run = api.allreduce_fusion
        self._pattern = api.AllReduceFusionPattern.kARResidualRMSNorm
        self._workspace = workspace
        self._max_tokens = max_tokens

    def takes(self, x: torch.Tensor) -> bool:
        """By the number of tokens alone, which all ranks know to be the same."""
        return 0 < x.shape[0] <= self._max_tokens

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As TensorGroup.sum_add_norm; x and residual stay what they are."""
        normed, added = torch.empty_like(residual), torch.empty_like(residual)
        self._run(
            x.contiguous(),
            self._workspace,
            self._pattern,
            residual_out=added,
            norm_out=normed,
            residual_in=residual.contiguous(),
            rms_gamma=weight,
            rms_eps=eps,
            fp32_acc=True,
        )
        return normed, added


def fused_sum(
    group: Ranks, *, one_machine: bool, hidden: int, dtype: torch.dtype, device: torch.device
) -> FusedSum | None:
    """Called by every rank; all get one, or all None where it is not offered, does not fit or gives something else."""
    if device.type != "cuda" or not one_machine:
        return None
    tokens = token_limit(group.size, hidden, dtype)
    if tokens == 0:
        log.info("fused sum over ranks: not for this shape", ranks=group.size, hidden=hidden, dtype=str(dtype))
        return None
    api = _import_comm()
    if not group.least(int(api is not None)):
        return None
    assert api is not None
    with torch.cuda.device(device):
        return build(api, group, hidden=hidden, dtype=dtype, device=device, tokens=tokens)


def token_limit(ranks: int, hidden: int, dtype: torch.dtype) -> int:
    """Tokens of the largest step it is for; 0: not for these sizes.

    Every rank keeps four times what all ranks bring for a step: room for both ways of summing, one of them threefold.
    """
    if ranks not in RANKS or dtype not in _HALF_DTYPES or hidden % _VECTOR:
        return 0
    return min(MAX_TOKENS, WORKSPACE_BYTES // (4 * ranks * hidden * dtype.itemsize))


def build(
    api: CommApi, group: Ranks, *, hidden: int, dtype: torch.dtype, device: torch.device, tokens: int
) -> FusedSum | None:
    """Set up and tried by all ranks together; whatever one of them meets, all go on without."""
    fused = _set_up(api, group, hidden, dtype, tokens)
    if not group.least(int(fused is not None)):
        return None
    assert fused is not None
    distance = _distance(fused, group, hidden, dtype, device, tokens)
    if group.least(int(distance <= TRIAL_DISTANCE)):
        log.info("fused sum over ranks", ranks=group.size, tokens=tokens, distance=round(distance, 5))
        return fused
    log.warning("fused sum over ranks: left out after its trial", distance=distance)
    return None


def _import_comm() -> CommApi | None:
    """With its kernels compiled, which takes minutes where FlashInfer has not done so before."""
    find_build_tool()
    try:
        api = importlib.import_module("flashinfer.comm")
        importlib.import_module("flashinfer.comm.trtllm_ar").get_trtllm_comm_module()
    except Exception as error:  # not installed, or its kernels do not compile for this card
        log.info("fused sum over ranks: not available", reason=f"{type(error).__name__}: {error}")
        return None
    return cast(CommApi, api)


def _set_up(api: CommApi, group: Ranks, hidden: int, dtype: torch.dtype, tokens: int) -> FusedSum | None:
    meeting = dist.new_group(backend="gloo", timeout=SETUP_TIMEOUT)
    try:
        workspace = api.create_allreduce_fusion_workspace(
            "trtllm",
            world_size=group.size,
            rank=group.rank,
            max_token_num=tokens,
            hidden_dim=hidden,
            dtype=dtype,
            group=meeting,
        )
    except Exception as error:  # GPUs that cannot reach each other's memory, a container that forbids it
        log.warning("fused sum over ranks: cannot be set up", reason=f"{type(error).__name__}: {error}")
        return None
    atexit.register(workspace.destroy)
    return FusedSum(api, workspace, tokens)


def _distance(
    fused: FusedSum, group: Ranks, hidden: int, dtype: torch.dtype, device: torch.device, tokens: int
) -> float:
    """How far it is off the reference, for one token and for as many as it takes; infinite where it fails."""
    trials = [_trial(rows, group.rank, hidden, dtype, device) for rows in (1, tokens)]
    expected = [add_norm(group.sum(x.clone()), residual.clone(), weight, TRIAL_EPS) for x, residual, weight in trials]
    try:
        actual = [fused(x, residual, weight, TRIAL_EPS) for x, residual, weight in trials]
        pairs = [pair for ours, theirs in zip(actual, expected, strict=True) for pair in zip(ours, theirs, strict=True)]
        distances = [float((ours.float() - theirs.float()).norm() / theirs.float().norm()) for ours, theirs in pairs]
    except Exception as error:  # a kernel that does not take these sizes
        log.warning("fused sum over ranks: fails", reason=f"{type(error).__name__}: {error}")
        return math.inf
    return max(distances) if all(map(math.isfinite, distances)) else math.inf


def _trial(
    rows: int, rank: int, hidden: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What each rank brings, and what is the same on all."""
    own, shared = torch.Generator().manual_seed(1 + rank), torch.Generator().manual_seed(0)
    x = torch.randn((rows, hidden), generator=own)
    residual = torch.randn((rows, hidden), generator=shared)
    weight = torch.rand(hidden, generator=shared) + 0.5
    return x.to(device, dtype), residual.to(device, dtype), weight.to(device, dtype)
