"""RMS normalisation in fp32 (Zhang and Sennrich, 2019), on CPUs rounded before the weight is applied."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last axis of x [..., n] by weight [n] or [heads, n]; the result has x's dtype."""
    if x.is_cuda:
        return fused_rms_norm(x, weight, eps)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def fused_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `rms_norm`, in one kernel on a GPU, where eight small ones would take longer to start than to run."""
    if weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    return F.rms_norm(x, x.shape[-1:], None, eps) * weight


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """x is added to `residual` in place; the sum normalised, and the sum."""
    residual += x
    return rms_norm(residual, weight, eps), residual
