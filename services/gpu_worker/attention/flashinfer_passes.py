"""One step's attention for layers of equal spec: decode rows, alone or in levels, then prefill rows.

Planned once a step, run once a layer. Leaves K and V to the Writer and the choice of cascades to `cascade`.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch

from services.gpu_worker.attention.base import AttentionSpec
from services.gpu_worker.attention.cascade import Cascade, CascadeCosts, Chooser
from services.gpu_worker.attention.flashinfer_api import DecodeWrapper, FlashInferApi, PrefillWrapper
from services.gpu_worker.attention.flashinfer_parts import (
    PlannedPages,
    PlanOptions,
    Shape,
    pinned,
    plan_options,
    upload,
)
from services.gpu_worker.attention.page_lists import PageSpans, keys_read, page_spans
from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.kv_cache import KV_LAYOUT

Scales = tuple[float | None, float | None]


class StepPages:
    """The rows' pages as all specs of a step share them, once on the device; made where a spec asks for them."""

    def __init__(self, batch: ForwardBatch, shape: Shape) -> None:
        self.batch, self.host, self._shape = batch, batch.host_columns(), shape

    @cached_property
    def decode(self) -> PlannedPages:
        """Of decode rows alone."""
        return self._whole(0, self.batch.num_decode_rows)

    @cached_property
    def prefill(self) -> PlannedPages:
        return self._whole(self.batch.num_decode_rows, self.batch.num_rows)

    def planned(self, spans: PageSpans) -> PlannedPages:
        """The spans' pages, whose ids are gathered on the device."""
        return PlannedPages.gathered(spans, self.batch.page_tables)

    def _whole(self, first: int, end: int) -> PlannedPages:
        lengths, width = self.host.kv_lengths[first:end], self.batch.page_tables.shape[1]
        rows = np.arange(first, end, dtype=np.int32)
        return self.planned(page_spans(lengths, self._shape.page_size, width, None, rows))


class SpecPass:
    """The wrappers of one AttentionSpec; each keeps the plan of the last step it was part of."""

    def __init__(self, api: FlashInferApi, shape: Shape, spec: AttentionSpec, workspace: torch.Tensor) -> None:
        self._api, self._shape, self._spec = api, shape, spec
        self._workspace = workspace
        self._options = plan_options(shape, spec)
        self._decode: DecodeWrapper = api.BatchDecodeWithPagedKVCacheWrapper(
            workspace, KV_LAYOUT, use_tensor_cores=shape.tensor_cores
        )
        self._prefill = self._prefill_wrapper()
        self._shared: list[PrefillWrapper] = []  # one a level, made where the first cascade of so many levels pays
        self._chooser = Chooser(shape.page_size, spec.sliding_window)
        self._decode_rows = 0
        self._cascade: Cascade | None = None
        self._order: torch.Tensor | None = None  # of the cascade's rows, and back; None where it is theirs
        self._place: torch.Tensor | None = None
        self.keys = 0  # read by one layer of the planned step

    def _prefill_wrapper(self) -> PrefillWrapper:
        return self._api.BatchPrefillWithPagedKVCacheWrapper(self._workspace, KV_LAYOUT)

    def choose(self, batch: ForwardBatch, costs: CascadeCosts) -> Cascade | None:
        """The cascade that pays for these layers, or None."""
        if not batch.groups:
            return None
        return self._chooser.choose(batch.host_columns(), batch.groups, batch.num_decode_rows, costs)

    def plan(self, pages: StepPages, costs: CascadeCosts) -> None:
        batch, host, split = pages.batch, pages.host, pages.batch.num_decode_rows
        window = self._spec.sliding_window
        self._decode_rows = split
        self._cascade = self.choose(batch, costs)
        self.keys = keys_read(np.diff(host.qo_indptr), host.kv_lengths, window)
        if split:
            private = pages.decode if self._cascade is None else self._plan_shared(self._cascade, pages)
            self._decode.plan(
                private.indptr, private.indices, private.last_page_len, *self._shape.heads, **self._options
            )
        if split < batch.num_rows:
            queries = pinned(host.qo_indptr[split:] - host.qo_indptr[split], self._shape.device)
            self._plan_prefill(self._prefill, queries, pages.prefill, causal=True)

    def _plan_shared(self, cascade: Cascade, pages: StepPages) -> PlannedPages:
        """Plans the shared levels; what is left of the decode rows' pages is returned."""
        shape = self._shape
        while len(self._shared) < len(cascade.levels):
            self._shared.append(self._prefill_wrapper())
        for wrapper, level in zip(self._shared, cascade.levels, strict=False):
            queries = pinned(level.qo_indptr, shape.device)
            self._plan_prefill(wrapper, queries, pages.planned(level.pages), causal=False)
        self._order = self._place = None
        if not cascade.in_order:
            self._order = upload(cascade.order, shape.device)
            self._place = upload(np.argsort(cascade.order).astype(np.int32), shape.device)
        self.keys -= cascade.saved_keys(shape.page_size)
        return pages.planned(cascade.private(pages.host, shape.page_size))

    def _plan_prefill(
        self, wrapper: PrefillWrapper, queries: torch.Tensor, pages: PlannedPages, *, causal: bool
    ) -> None:
        # Where the rows of a group are all within the window, and only then do they share a level, it hides nothing.
        options = self._options if causal else PlanOptions(**{**self._options, "window_left": -1})
        wrapper.plan(
            queries,
            pages.indptr,
            pages.indices,
            pages.last_page_len,
            *self._shape.heads,
            causal=causal,
            **options,
        )

    def run(self, q: torch.Tensor, cache: torch.Tensor, scales: Scales) -> torch.Tensor:
        """q [T, Hq, D] -> [T, Hq, D], contiguous."""
        split = self._decode_rows
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if split:
            if self._cascade is None:
                self._call(self._decode, q[:split], cache, scales, out[:split])
            else:
                self._run_levels(self._cascade, q[:split], cache, scales, out[:split])
        if split < len(q):
            self._call(self._prefill, q[split:], cache, scales, out[split:])
        return out

    def _run_levels(
        self, cascade: Cascade, q: torch.Tensor, cache: torch.Tensor, scales: Scales, out: torch.Tensor
    ) -> None:
        """All levels of all decode rows into `out`."""
        mixed = out
        if self._order is not None:
            q, mixed = q.index_select(0, self._order), torch.empty_like(out)
        lse = self._call(self._decode, q, cache, scales, mixed, return_lse=True)
        for wrapper, level in zip(self._shared, cascade.levels, strict=False):
            rows = level.rows
            shared = torch.empty_like(mixed[:rows])
            shared_lse = self._call(wrapper, q[:rows], cache, scales, shared, return_lse=True)
            self._api.merge_state_in_place(mixed[:rows], lse[:rows], shared, shared_lse)  # both, for the next level
        if self._place is not None:
            torch.index_select(mixed, 0, self._place, out=out)

    @staticmethod
    def _call(
        wrapper: DecodeWrapper | PrefillWrapper,
        q: torch.Tensor,
        cache: torch.Tensor,
        scales: Scales,
        out: torch.Tensor,
        *,
        return_lse: bool = False,
    ) -> torch.Tensor:
        """Fills `out`; returns the log-sum-exps where they are wanted."""
        k_scale, v_scale = scales
        result = wrapper.run(q, cache, k_scale=k_scale, v_scale=v_scale, out=out, return_lse=return_lse)
        return result[1] if return_lse else out
