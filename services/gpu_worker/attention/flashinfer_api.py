"""What we call of FlashInfer, and the one place that imports it. Leaves what the calls mean together to `flashinfer`.

The names and parameters are FlashInfer's own, so that its module is the real thing and nothing stands in between. Tests
bind every call against a table of its signatures.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any, Protocol, cast

import torch

PageTensors = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class FlashInferMissing(Exception):
    """FlashInfer cannot be imported; the message says why."""


class _Planned(Protocol):
    """What runs once it has a plan."""

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: PageTensors,
        *,
        k_scale: float | None,
        v_scale: float | None,
        out: torch.Tensor,
        return_lse: bool,
    ) -> Any:
        """Fills `out`; returns it, or it with the log-sum-exps [rows, heads] to base 2."""
        ...


class DecodeWrapper(_Planned, Protocol):
    """Attention of one query a row over the row's pages."""

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
    ) -> None: ...


class PrefillWrapper(_Planned, Protocol):
    """Attention of any number of queries a row over the row's pages."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        window_left: int,
        logits_soft_cap: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None: ...


class FlashInferApi(Protocol):
    """The module `flashinfer`, as far as we use it."""

    def BatchDecodeWithPagedKVCacheWrapper(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        *,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> DecodeWrapper: ...

    def BatchPrefillWithPagedKVCacheWrapper(
        self, float_workspace_buffer: torch.Tensor, kv_layout: str
    ) -> PrefillWrapper: ...

    def append_paged_kv_cache(
        self,
        append_key: torch.Tensor,
        append_value: torch.Tensor,
        batch_indices: torch.Tensor,
        positions: torch.Tensor,
        paged_kv_cache: PageTensors,
        kv_indices: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_last_page_len: torch.Tensor,
        kv_layout: str,
    ) -> None: ...

    def merge_state_in_place(
        self, v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor
    ) -> None: ...


def import_flashinfer() -> FlashInferApi:
    """The installed package; the first import takes many seconds. Raises FlashInferMissing."""
    find_build_tool()
    # On some cards "auto" is cuDNN for some batch sizes: no kernel that was tried at start, and one whose plan fetches
    # the page ids from the device.
    os.environ.setdefault("FLASHINFER_DECODE_AUTO_CUDNN", "0")
    try:
        module = importlib.import_module("flashinfer")
    except (ImportError, OSError, RuntimeError) as error:  # a library of CUDA that is missing is an OSError
        raise FlashInferMissing(f"flashinfer cannot be imported: {error}") from error
    for name in ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"):
        if not hasattr(module, name):
            raise FlashInferMissing(f"the installed flashinfer has no {name}")
    return cast(FlashInferApi, module)


def find_build_tool() -> None:
    """FlashInfer calls `ninja` by its bare name, which lies beside our Python where its environment is not active."""
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja") is None and (Path(scripts) / "ninja").is_file():
        os.environ["PATH"] = os.pathsep.join((os.environ.get("PATH", os.defpath), scripts))
