"""Attention through FlashInfer's kernels: paged prefill and decode, shared prefixes read once, graphs.

Leaves kernels to FlashInfer, the cutting of shared prefixes to `cascade`, fallback to the caller. Sampling is not
FlashInfer's: even with a seed and an offset for each row its samplers mix in the row's index in the batch, so that a
token would depend on its neighbours. Ours depends on (seed, position): the same alone, in any batch, after a resume.

    plan     host: which pages -> their ids gathered on the device -> one plan for each distinct spec   (once a step)
    forward  append K and V -> decode rows [-> shared levels, merged] and prefill rows   (every layer)
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import structlog
import torch

from services.gpu_worker.attention.base import AttentionBackend, AttentionSpec
from services.gpu_worker.attention.cascade import CascadeCosts
from services.gpu_worker.attention.flashinfer_api import FlashInferApi, FlashInferMissing, import_flashinfer
from services.gpu_worker.attention.flashinfer_graph import GraphDecode, IndexBuffers
from services.gpu_worker.attention.flashinfer_parts import KeyCounter, Layers, PlanFence, Shape, Writer
from services.gpu_worker.attention.flashinfer_passes import SpecPass, StepPages
from services.gpu_worker.batch import ForwardBatch, HostColumns, SharedGroup
from services.gpu_worker.faults import classify
from services.gpu_worker.kv_cache import FP8, KVCache
from services.gpu_worker.models.config import ModelConfig

log = structlog.get_logger()

HEAD_DIMS = (64, 128, 256)  # what decode, prefill and append are all built for
QUERY_DTYPES = (torch.float16, torch.bfloat16)
KV_DTYPES = (*QUERY_DTYPES, FP8)
LEAST_CAPABILITY = (8, 0)  # bfloat16 in tensor cores
WORKSPACE_BYTES = 128 << 20
"""What FlashInfer recommends. Partial results of split rows need at most 2 blocks an SM of 128 queries by 256 floats,
about 40 MB on the largest cards."""
TRIALS = ((2, 2), (66, 80))
"""Decode rows of a group, tokens of a prompt: on some cards more than 64 queries of a row have kernels of their own.
The larger group has one within it: a level more, with a request without pages."""


class FlashInferUnavailable(Exception):
    """FlashInfer cannot serve this model here; the message says why."""


def load(kv_cache: KVCache, config: ModelConfig) -> FlashInferAttention:
    """The backend over `kv_cache`, its kernels built and tried out. Raises FlashInferUnavailable."""
    device = kv_cache.layers[0].device
    if device.type != "cuda":
        raise FlashInferUnavailable(f"flashinfer needs a CUDA device, the cache is on {device}")
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        raise FlashInferUnavailable(f"flashinfer needs compute capability {LEAST_CAPABILITY[0]}.0 or more")
    reason = refusal(kv_cache, config)
    if reason:
        raise FlashInferUnavailable(reason)
    try:
        api = import_flashinfer()
    except FlashInferMissing as error:
        raise FlashInferUnavailable(str(error)) from error
    return build(kv_cache, config, api)


def refusal(kv_cache: KVCache, config: ModelConfig) -> str | None:
    """Why FlashInfer has no kernels for this model and cache, None where it has."""
    layer = kv_cache.layers[0]
    if config.deterministic:
        return "--deterministic needs sums that do not depend on the batch, flashinfer splits rows by it"
    if config.head_dim not in HEAD_DIMS:
        return f"flashinfer has no kernels for head_dim {config.head_dim}, only for {', '.join(map(str, HEAD_DIMS))}"
    if config.dtype not in QUERY_DTYPES or layer.dtype not in KV_DTYPES:
        return f"flashinfer has no kernels for {config.dtype} queries over {layer.dtype} keys"
    return None


def build(kv_cache: KVCache, config: ModelConfig, api: FlashInferApi) -> FlashInferAttention:
    """The backend after a trial step, so that kernels are compiled now and what cannot work fails here.

    Raises FlashInferUnavailable; a lack of memory and an error of the device are the start's and come as they are.
    """
    attention, began = FlashInferAttention(kv_cache, config, api), time.monotonic()
    log.info("trying flashinfer's kernels: what the package flashinfer-jit-cache does not bring, nvcc compiles once")
    try:
        attention.warm_up()
    except Exception as error:  # no compiler, no kernel for this card: building them can fail in many ways
        if classify(error) in ("oom", "cuda"):
            raise
        raise FlashInferUnavailable(f"flashinfer's kernels do not run here: {error}") from error
    log.info("flashinfer kernels are ready", seconds=round(time.monotonic() - began, 2))
    return attention


class FlashInferAttention:
    """A GraphAttention; captured and eager steps belong to one stream. Layers of equal spec share a plan.

    Workspace and wrappers live as long as the backend. costs: None takes what fits the cache.
    """

    def __init__(
        self, kv_cache: KVCache, config: ModelConfig, api: FlashInferApi, costs: CascadeCosts | None = None
    ) -> None:
        self._api, self._shape, self._specs = api, Shape.of(kv_cache, config), config.attention
        self._layers, self._counter = Layers(kv_cache), KeyCounter()
        self._costs = costs or CascadeCosts(self._shape.bytes_per_key, self._shape.bytes_per_row)
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._shape.device)
        self._writer = Writer(api, self._shape, self._layers)
        self._layers_of = Counter(config.attention)
        self._passes = {spec: SpecPass(api, self._shape, spec, self._workspace) for spec in self._layers_of}
        self._fence = PlanFence(self._shape.device)
        self._buffers: IndexBuffers | None = None  # of graphs: best asked for from the largest down

    @property
    def kv_bytes_read(self) -> int:
        """Bytes of K and V read from the cache so far, those of graph backends included."""
        return self._counter.bytes

    def plan(self, batch: ForwardBatch) -> None:
        """Raises ValueError for rows without tokens or with more than their page tables hold."""
        self._plan(batch, self._costs)

    def _plan(self, batch: ForwardBatch, costs: CascadeCosts) -> None:
        pages = StepPages(batch, self._shape)
        self._fence.wait()
        self._writer.plan(batch.kv_slots)
        for spec_pass in self._passes.values():
            spec_pass.plan(pages, costs)
        self._fence.record()

    def forward(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """As AttentionBackend.forward; q, k and v may be slices of one fused tensor."""
        spec_pass = self._passes[spec]
        self._writer.write(layer, k, v)
        self._counter.bytes += spec_pass.keys * self._shape.bytes_per_key
        return spec_pass.run(q, self._layers[layer], self._layers.scales(layer))

    def graph_backend(self, batch_size: int, max_pages: int) -> AttentionBackend:
        """As GraphAttention; each holds some 8 MiB of the device, and of pinned memory, for each distinct spec."""
        pages = batch_size * max_pages
        if self._buffers is None or not self._buffers.holds(batch_size, pages):
            self._buffers = IndexBuffers.empty(batch_size, pages, self._shape.device)
        buffers = self._buffers.part(batch_size, pages)
        return GraphDecode(self._api, self._shape, self._layers, self._specs, self._workspace, self._counter, buffers)

    def cascade_gain(self, batch: ForwardBatch) -> int:
        """Bytes that one step reads less when its groups are read together; 0 where that does not pay.

        What a caller weighs against a graph, which reads them row by row.
        """
        gained = 0
        for spec, layers in self._layers_of.items():
            cascade = self._passes[spec].choose(batch, self._costs)
            if cascade is not None:
                gained += layers * cascade.saved_keys(self._shape.page_size)
        return gained * self._shape.bytes_per_key

    def warm_up(self) -> None:
        """Steps of every kind over the first two pages of an unused cache, for all specs. Counts as nothing read."""
        shape, counted = self._shape, self._counter.bytes
        for rows, prompt in TRIALS:
            batch = _trial_batch(shape.page_size, rows, prompt, shape.device)
            tokens = batch.num_tokens
            queries = torch.zeros((tokens, shape.q_heads, shape.head_dim), dtype=shape.q_dtype, device=shape.device)
            keys = torch.zeros((tokens, shape.kv_heads, shape.head_dim), dtype=shape.q_dtype, device=shape.device)
            self._plan(batch, replace(self._costs, bytes_per_key=1, bytes_per_row=0, bytes_per_launch=0))
            for spec in self._passes:
                out = self.forward(self._specs.index(spec), queries, keys, keys, spec)
                if not bool(out.isfinite().all()):  # also waits for the device, whose errors belong here
                    raise RuntimeError("attention over zeros gave something else than numbers")
        self._counter.bytes = counted


def _trial_batch(page_size: int, members: int, prompt: int, device: torch.device) -> ForwardBatch:
    """Two groups of decode rows over page 0, a third of each also over page 1, and a prefill row of `prompt` tokens.

    All tables take turns with these two pages.
    """
    pages, rows = max(3, -(-prompt // page_size)), 2 * members
    shared = [(range(first, first + members), 1) for first in (0, members)]
    shared += [(range(first, first + members // 3), 2) for first in (0, members)]
    groups = [(np.array(group, dtype=np.int32), count) for group, count in shared if len(group) > 1]
    host = HostColumns(
        qo_indptr=np.array([*range(rows + 1), rows + prompt], dtype=np.int32),
        kv_lengths=np.array([2 * page_size + 1] * rows + [prompt], dtype=np.int32),
        table_width=pages,
        group_rows=tuple(group for group, _ in groups),
    )
    slots = [0] * rows + [token % (2 * page_size) for token in range(prompt)]

    def on(values: list[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return ForwardBatch(
        token_ids=on([0] * len(slots)),
        positions=on([2 * page_size] * rows + list(range(prompt))),
        qo_indptr=on(host.qo_indptr.tolist(), torch.int32),
        kv_lengths=on(host.kv_lengths.tolist(), torch.int32),
        page_tables=torch.from_numpy(np.tile(np.arange(pages, dtype=np.int32) % 2, (rows + 1, 1))).to(device),
        kv_slots=on(slots),
        logit_rows=on([]),
        num_decode_rows=rows,
        groups=tuple(SharedGroup(on(group.tolist(), torch.int32), count) for group, count in groups),
        host=host,
    )
