"""Random ragged batches over scattered pages, some of them shared, for FlashInfer's backend and the reference."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from services.gpu_worker.attention.base import AttentionBackend, AttentionSpec
from services.gpu_worker.attention.cascade import CascadeCosts
from services.gpu_worker.attention.flashinfer import FlashInferAttention
from services.gpu_worker.attention.flashinfer_api import FlashInferApi
from services.gpu_worker.attention.flashinfer_parts import Shape
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.batch import ForwardBatch, SharedGroup
from services.gpu_worker.kv_cache import FP8, KVCache
from services.gpu_worker.models.config import ModelConfig
from tests.gpu_worker.tiny_models import UNDEFINED_PAGE

CPU = torch.device("cpu")
EXACT = {"rtol": 0.0, "atol": 5e-6}  # float32, with sums in another order
FREE = CascadeCosts(bytes_per_key=1, bytes_per_row=0, bytes_per_launch=0)  # every group pays


@dataclass
class Scene:
    """Decode rows of `decodes` tokens (their new one included), then prefill rows of (cached, new) tokens.

    groups: (rows, pages) whose first pages are made the same pages. Every layer has the same random contents.
    """

    decodes: list[int]
    prefills: list[tuple[int, int]] = field(default_factory=list)
    groups: list[tuple[list[int], int]] = field(default_factory=list)
    kv_heads: int = 2
    heads: int = 4
    dim: int = 64
    page_size: int = 16
    specs: tuple[AttentionSpec, ...] = (AttentionSpec(0.125), AttentionSpec(0.125))
    dtype: torch.dtype = torch.float32
    scales: tuple[tuple[float, float], ...] = ()  # one pair a layer: the cache has 8 bits
    seed: int = 0
    device: torch.device = CPU

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.rows = [(length - 1, 1) for length in self.decodes] + self.prefills
        needed = [-(-(cached + new) // self.page_size) for cached, new in self.rows]
        num_pages = sum(needed) + 2
        free = random.Random(self.seed).sample(range(num_pages), num_pages)
        self.tables = [[free.pop() for _ in range(count)] for count in needed]
        for rows, pages in self.groups:
            for row in rows[1:]:
                self.tables[row][:pages] = self.tables[rows[0]][:pages]
        self.num_pages = num_pages
        shape = (num_pages, 2, self.kv_heads, self.page_size, self.dim)
        self.contents = (
            torch.randn(shape, generator=self.generator).to(FP8 if self.scales else self.dtype).to(self.device)
        )
        tokens = sum(new for _, new in self.rows)
        fused = torch.randn((tokens, self.heads + 2 * self.kv_heads, self.dim), generator=self.generator).to(self.dtype)
        self.q, self.k, self.v = fused.to(self.device).split([self.heads, self.kv_heads, self.kv_heads], dim=1)

    @property
    def config(self) -> ModelConfig:
        return ModelConfig(
            architecture="test",
            model_type="test",
            implementation="own",
            digest="",
            dtype=self.dtype,
            vocab_size=2,
            hidden=1,
            num_layers=len(self.specs),
            num_heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.dim,
            max_context=1 << 20,
            eos_ids=(),
            attention=self.specs,
        )

    def cache(self) -> KVCache:
        layers = len(self.specs)
        dtype = FP8 if self.scales else self.dtype
        cache = KVCache(
            layers, self.num_pages, self.page_size, self.kv_heads, self.dim, dtype, self.device, self.scales
        )
        for layer in cache.layers:
            layer.copy_(self.contents)
        return cache

    def batch(self) -> ForwardBatch:
        size = self.page_size
        spans = [range(cached, cached + new) for cached, new in self.rows]
        slots = [t[p // size] * size + p % size for t, span in zip(self.tables, spans, strict=True) for p in span]
        width = max(map(len, self.tables)) + 1
        indptr = torch.tensor([0, *(len(span) for span in spans)]).cumsum(0)

        def on(values: list[int] | list[list[int]], dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=self.device)

        return ForwardBatch(
            token_ids=on([0] * len(slots)),
            positions=on([p for span in spans for p in span]),
            qo_indptr=indptr.int().to(self.device),
            kv_lengths=on([span.stop for span in spans], torch.int32),
            page_tables=on([t + [UNDEFINED_PAGE] * (width - len(t)) for t in self.tables], torch.int32),
            kv_slots=on(slots),
            logit_rows=on([]),
            num_decode_rows=len(self.decodes),
            groups=tuple(SharedGroup(on(rows, torch.int32), pages) for rows, pages in self.groups),
        )

    def backend(
        self, api: FlashInferApi, cache: KVCache | None = None, costs: CascadeCosts | None = None
    ) -> FlashInferAttention:
        return FlashInferAttention(cache or self.cache(), self.config, api, costs)

    def shape(self) -> Shape:
        return Shape.of(self.cache(), self.config)

    def layers(self, attention: AttentionBackend, batch: ForwardBatch | None = None) -> list[torch.Tensor]:
        """What each layer gives for the batch."""
        attention.plan(batch or self.batch())
        return [attention.forward(i, self.q, self.k, self.v, spec) for i, spec in enumerate(self.specs)]

    def expected(self) -> list[torch.Tensor]:
        return self.layers(ReferenceAttention(self.cache()))
