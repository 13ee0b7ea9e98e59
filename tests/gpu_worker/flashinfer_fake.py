"""FlashInfer as far as the worker calls it, in torch on the CPU: the real signatures, and the real demands as errors.

Sums are in float32, outputs are poisoned before they are written, log-sum-exps are to base 2. What is called between
`capture` and its end can be replayed with whatever the fixed buffers hold by then, as a CUDA graph would.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from services.gpu_worker.kv_cache import as_bytes
from tests.gpu_worker.flashinfer_signatures import bind

HEAD_DIMS = {64, 128, 256}
CUDA_CORE_GROUPS = {1, 2, 3, 4, 6, 8, 16}
HALVES = {torch.float16, torch.bfloat16}
FP8 = {torch.float8_e4m3fn, torch.float8_e5m2}
INT_BUFFERS = ("paged_kv_indptr_buffer", "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer")


class Refused(Exception):
    """The real library, or its kernels, would fail or read and write out of place."""


def require(condition: object, message: str) -> None:
    if not condition:
        raise Refused(message)


class FakeFlashInfer:
    """The module. float32: also take a dtype that the real one has no kernels for, to compare exactly."""

    def __init__(self, *, float32: bool = False) -> None:
        self.dtypes = HALVES | ({torch.float32} if float32 else set())
        self.calls: list[str] = []
        self.graph: list[Callable[[], object]] | None = None

    def BatchDecodeWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> FakeDecode:
        return FakeDecode(self, *args, **kwargs)

    def BatchPrefillWithPagedKVCacheWrapper(self, *args: Any, **kwargs: Any) -> FakePrefill:
        return FakePrefill(self, *args, **kwargs)

    @contextlib.contextmanager
    def capture(self) -> Iterator[list[Callable[[], object]]]:
        """Calls in here are recorded besides being made; call them again to replay."""
        self.graph = []
        try:
            yield self.graph
        finally:
            self.graph = None

    def record(self, call: Callable[[], Any]) -> Any:
        if self.graph is not None:
            self.graph.append(call)
        return call()

    def append_paged_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        a = bind("append_paged_kv_cache", *args, **kwargs)
        self.calls.append("append_paged_kv_cache")
        cache, k, v = a["paged_kv_cache"], a["append_key"], a["append_value"]
        require(a["kv_layout"] == "HND" and cache.dim() == 5, "a cache of another layout")
        require(k.dtype == v.dtype == cache.dtype, f"{k.dtype} appended to {cache.dtype}")
        require(cache.shape[4] in HEAD_DIMS, f"no append for head_dim {cache.shape[4]}")
        require(k.shape == v.shape and k.shape[1:] == (cache.shape[2], cache.shape[4]), "K and V of another shape")
        require(k.stride(2) == v.stride(2) == 1, "K or V with a strided last axis")
        indices = [a[name] for name in ("batch_indices", "positions", "kv_indices", "kv_indptr", "kv_last_page_len")]
        require(all(i.dtype == torch.int32 and i.is_contiguous() for i in indices), "an index array is not plain int32")
        require(len(a["kv_indptr"]) == len(a["kv_last_page_len"]) + 1, "kv_indptr does not fit")
        require(len(a["batch_indices"]) == len(a["positions"]) == len(k), "not one position a token")
        self.record(lambda: _append(a))

    def merge_state_in_place(self, *args: Any, **kwargs: Any) -> None:
        a = bind("merge_state_in_place", *args, **kwargs)
        self.calls.append("merge_state_in_place")
        v, s, other, s_other = (a[name] for name in ("v", "s", "v_other", "s_other"))
        require(all(t.is_contiguous() for t in (v, s, other, s_other)), "a state is not contiguous")
        require(v.shape == other.shape and s.shape == s_other.shape == v.shape[:2], "states of different shapes")
        require(v.dtype == other.dtype and v.dtype in self.dtypes, f"states in {v.dtype}")
        require(s.dtype == s_other.dtype == torch.float32, "log-sum-exps that are not float32")
        require(a["mask"] is None, "not faked")
        self.record(lambda: _merge(v, s, other, s_other))


def _merge(v: torch.Tensor, s: torch.Tensor, other: torch.Tensor, s_other: torch.Tensor) -> None:
    total = torch.logaddexp2(s, s_other)
    v.copy_(v.float() * torch.exp2(s - total)[..., None] + other.float() * torch.exp2(s_other - total)[..., None])
    s.copy_(total)


def _append(a: dict[str, Any]) -> None:
    cache = a["paged_kv_cache"]
    size = cache.shape[3]
    for i, (row, position) in enumerate(zip(a["batch_indices"].tolist(), a["positions"].tolist(), strict=True)):
        entry = int(a["kv_indptr"][row]) * size + position
        require(entry // size < int(a["kv_indptr"][row + 1]), "a position beyond the row's pages")
        page = int(a["kv_indices"][entry // size])
        require(0 <= page < len(cache), f"page {page} is not in the cache")
        as_bytes(cache)[page, 0, :, entry % size] = as_bytes(a["append_key"][i])
        as_bytes(cache)[page, 1, :, entry % size] = as_bytes(a["append_value"][i])


class _Wrapper:
    """What both wrappers check and compute; `_rows` are the planned rows' pages."""

    name: str

    def __init__(self, api: FakeFlashInfer, settings: dict[str, Any]) -> None:
        self.api, self.settings = api, settings
        workspace = settings["float_workspace_buffer"]
        require(workspace.dtype == torch.uint8 and workspace.numel() >= 128 << 20, "a workspace that is too small")
        require(settings["kv_layout"] == "HND", f"layout {settings['kv_layout']} over a cache of HND")
        self.planned: dict[str, Any] | None = None
        self.indptr = self.indices = self.last_page_len = self.queries = torch.empty(0)

    def _check_plan(self, a: dict[str, Any], head_dim: int) -> None:
        require(self.api.graph is None, "planning while a graph is captured")
        require(a["num_qo_heads"] % a["num_kv_heads"] == 0, "query heads do not divide")
        require(head_dim in HEAD_DIMS, f"no kernel for head_dim {head_dim}")
        require(a["q_data_type"] in self.api.dtypes, f"no kernel for queries in {a['q_data_type']}")
        require(a["kv_data_type"] in self.api.dtypes | FP8, f"no kernel for keys in {a['kv_data_type']}")
        require(a["kv_data_type"] in FP8 or a["kv_data_type"] == a["q_data_type"], "queries and keys differ")
        require(isinstance(a["sm_scale"], float) and isinstance(a["logits_soft_cap"], float), "a scale is no float")
        require(a["window_left"] >= -1, "a negative window")
        require(a["pos_encoding_mode"] == "NONE", "rope twice")

    @staticmethod
    def _check_lists(*lists: torch.Tensor, page_size: int, empty: bool = False) -> None:
        """empty: rows without pages may be among them."""
        require(all(t.dtype == torch.int32 and t.is_contiguous() for t in lists), "a page list is not plain int32")
        indptr, indices, last = lists
        require(len(indptr) == len(last) + 1 and int(indptr[0]) == 0, "kv indptr does not fit")
        counts = indptr.diff()
        require(
            bool((counts >= (0 if empty else 1)).all()) and int(indptr[-1]) == len(indices), "kv indptr is no partition"
        )
        fits = torch.where(counts > 0, (last >= 1) & (last <= page_size), last == 0)
        require(bool(fits.all()), "last_page_len is not 1 .. page size, or not 0 without pages")

    def _run(self, a: dict[str, Any]) -> Any:
        plan = self.planned
        if plan is None:
            raise Refused("run before plan")
        q, cache, out = a["q"], a["paged_kv_cache"], a["out"]
        require(q.dtype == plan["q_data_type"] and cache.dtype == plan["kv_data_type"], "dtypes differ from the plan's")
        require(q.shape[1:] == (plan["num_qo_heads"], cache.shape[4]) and q.stride(2) == 1, "queries of another shape")
        require(len(q) == int(self.queries[-1]), f"{len(q)} queries, planned were {int(self.queries[-1])}")
        require(cache.shape[2:4] == (plan["num_kv_heads"], plan["page_size"]), "another cache than planned")
        require(out is not None and out.shape == q.shape and out.dtype == q.dtype, "out does not fit")
        require(out.is_contiguous(), "out is not contiguous")
        require(all(s is None or isinstance(s, float) for s in (a["k_scale"], a["v_scale"])), "a scale is no float")
        lse = torch.full(q.shape[:2], math.nan) if a["return_lse"] else None
        self.api.record(lambda: self._attend(plan, a, out, lse))
        return (out, lse) if lse is not None else out

    def _attend(self, plan: dict[str, Any], a: dict[str, Any], out: torch.Tensor, lse: torch.Tensor | None) -> None:
        q, cache, size = a["q"], a["paged_kv_cache"], plan["page_size"]
        out.fill_(math.nan)
        ends, begins = self.indptr[1:].tolist(), self.indptr[:-1].tolist()
        for row, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            first, last = int(self.queries[row]), int(self.queries[row + 1])
            if begin == end:  # nothing to see: zeros that weigh nothing
                out[first:last] = 0
                if lse is not None:
                    lse[first:last] = -math.inf
                continue
            pages = self.indices[begin:end].long()
            require(int(pages.min()) >= 0 and int(pages.max()) < len(cache), "a page that is not in the cache")
            length = (end - begin - 1) * size + int(self.last_page_len[row])
            keys, values = (
                as_bytes(cache)[pages].view(cache.dtype).float().permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
            )
            mixed, sums = _attention(q[first:last].float(), keys, values, plan, a["k_scale"] or 1.0)
            out[first:last] = (mixed * (a["v_scale"] or 1.0)).to(out.dtype)
            if lse is not None:
                lse[first:last] = sums


def _attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, plan: dict[str, Any], k_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [n, Hq, D], keys and values [L, Hkv, D] -> [n, Hq, D] and the log-sum-exps [n, Hq] to base 2."""
    group = q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * (plan["sm_scale"] * k_scale)
    if plan["logits_soft_cap"] > 0:
        scores = plan["logits_soft_cap"] * torch.tanh(scores / plan["logits_soft_cap"])
    # Queries are the last positions of their row, whether the mask is causal or not.
    position = torch.arange(len(q))[:, None] + len(keys) - len(q)
    key = torch.arange(len(keys))[None]
    hidden = torch.zeros(len(q), len(keys), dtype=torch.bool)
    if plan["causal"]:
        hidden |= key > position
    if plan["window_left"] >= 0:
        hidden |= key < position - plan["window_left"]
    scores = scores.masked_fill(hidden, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), (scores.logsumexp(-1) / math.log(2)).T


class FakeDecode(_Wrapper):
    name = "BatchDecodeWithPagedKVCacheWrapper"

    def __init__(self, api: FakeFlashInfer, *args: Any, **kwargs: Any) -> None:
        super().__init__(api, bind(f"{self.name}.__init__", self, *args, **kwargs))
        api.calls.append(f"{self.name}.__init__")
        self.buffers = [self.settings[name] for name in INT_BUFFERS]
        if self.settings["use_cuda_graph"]:
            require(all(torch.is_tensor(b) and b.dtype == torch.int32 for b in self.buffers), "a buffer is missing")
            require(len(self.buffers[0]) == len(self.buffers[2]) + 1, "buffers of different batch sizes")
            self.indptr, self.indices, self.last_page_len = self.buffers

    def plan(self, *args: Any, **kwargs: Any) -> None:
        outer = bind(f"{self.name}.plan", self, *args, **kwargs)
        require(not outer["deprecated_positional_args"], "deprecated positional arguments")
        a = bind(f"{self.name}._plan_impl", self, *args, **kwargs)
        self.api.calls.append(f"{self.name}.plan")
        self._check_plan(a, a["head_dim"])
        group = a["num_qo_heads"] // a["num_kv_heads"]
        require(self.settings["use_tensor_cores"] or group in CUDA_CORE_GROUPS, f"no decode for groups of {group}")
        lists = a["indptr"], a["indices"], a["last_page_len"]
        self._check_lists(*lists, page_size=a["page_size"])
        if self.settings["use_cuda_graph"]:
            require(len(lists[2]) == len(self.buffers[2]), "another batch size than the graph's")
            require(len(lists[1]) <= len(self.buffers[1]), "more pages than the graph's buffer holds")
            for buffer, values in zip(self.buffers, lists, strict=True):
                buffer[: len(values)].copy_(values)
        else:
            self.indptr, self.indices, self.last_page_len = (t.clone() for t in lists)
        self.queries = torch.arange(len(lists[2]) + 1)
        self.planned = {**a, "causal": False}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.api.calls.append(f"{self.name}.run")
        return self._run(bind(f"{self.name}.run", self, *args, **kwargs))


class FakePrefill(_Wrapper):
    name = "BatchPrefillWithPagedKVCacheWrapper"

    def __init__(self, api: FakeFlashInfer, *args: Any, **kwargs: Any) -> None:
        super().__init__(api, bind(f"{self.name}.__init__", self, *args, **kwargs))
        api.calls.append(f"{self.name}.__init__")
        require(not self.settings["use_cuda_graph"], "prefill in graphs is not faked")

    def plan(self, *args: Any, **kwargs: Any) -> None:
        a = bind(f"{self.name}.plan", self, *args, **kwargs)
        self.api.calls.append(f"{self.name}.plan")
        self._check_plan(a, a["head_dim_qk"])
        require(a["custom_mask"] is None and a["head_dim_vo"] in (None, a["head_dim_qk"]), "not faked")
        lists = a["paged_kv_indptr"], a["paged_kv_indices"], a["paged_kv_last_page_len"]
        self._check_lists(*lists, page_size=a["page_size"], empty=not a["causal"])
        queries = a["qo_indptr"]
        require(queries.dtype == torch.int32 and len(queries) == len(lists[0]), "qo_indptr does not fit")
        require(int(queries[0]) == 0 and bool((queries.diff() > 0).all()), "qo_indptr is no partition")
        lengths = (lists[0].diff() - 1) * a["page_size"] + lists[2]
        require(
            not a["causal"] or bool((lengths >= queries.diff()).all()), "more queries than keys under a causal mask"
        )
        self.indptr, self.indices, self.last_page_len, self.queries = (t.clone() for t in (*lists, queries))
        self.planned = a

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.api.calls.append(f"{self.name}.run")
        a = bind(f"{self.name}.run", self, *args, **kwargs)
        require(a["lse_base"] == "log2" and a["lse_layout"] == "NH", "another form of log-sum-exp")
        return self._run(a)
