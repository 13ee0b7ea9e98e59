"""The reference attention against a naive loop in double precision, over random ragged batches."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.attention.base import AttentionSpec
from services.gpu_worker.attention.reference import QUERY_BLOCK, ReferenceAttention
from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.kv_cache import KVCache
from tests.gpu_worker.tiny_models import UNDEFINED_PAGE

DIM = 8


class Scene:
    """Rows of (cached, new) tokens over scattered pages, with the whole K and V of each row kept aside."""

    def __init__(
        self, rows: list[tuple[int, int]], page_size: int, kv_heads: int, heads: int, seed: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.heads, self.kv_heads = rows, heads, kv_heads
        lengths = [cached + new for cached, new in rows]
        needed = [math.ceil(length / page_size) for length in lengths]
        num_pages = sum(needed) + 3
        free = random.Random(seed).sample(range(num_pages), num_pages)
        self.tables = [[free.pop() for _ in range(count)] for count in needed]
        self.cache = KVCache(2, num_pages, page_size, kv_heads, DIM, dtype, torch.device("cpu"))
        for layer in self.cache.layers:
            layer.fill_(float("nan"))
        self.keys = [torch.randn((n, kv_heads, DIM), generator=generator).to(dtype) for n in lengths]
        self.values = [torch.randn((n, kv_heads, DIM), generator=generator).to(dtype) for n in lengths]
        self.queries = torch.randn((sum(new for _, new in rows), heads, DIM), generator=generator).to(dtype)
        for row, (cached, _) in enumerate(rows):
            for position in range(cached):
                page, offset = self.tables[row][position // page_size], position % page_size
                self.cache.layers[1][page, 0, :, offset] = self.keys[row][position]
                self.cache.layers[1][page, 1, :, offset] = self.values[row][position]
        self.batch = self._batch(page_size)

    def _batch(self, page_size: int) -> ForwardBatch:
        positions = [p for cached, new in self.rows for p in range(cached, cached + new)]
        owners = [row for row, (_, new) in enumerate(self.rows) for _ in range(new)]
        slots = [
            self.tables[row][p // page_size] * page_size + p % page_size
            for row, p in zip(owners, positions, strict=True)
        ]
        width = max(map(len, self.tables)) + 1
        indptr = [0]
        for _, new in self.rows:
            indptr.append(indptr[-1] + new)
        return ForwardBatch(
            token_ids=torch.zeros(len(positions), dtype=torch.int64),
            positions=torch.tensor(positions),
            qo_indptr=torch.tensor(indptr, dtype=torch.int32),
            kv_lengths=torch.tensor([cached + new for cached, new in self.rows], dtype=torch.int32),
            page_tables=torch.tensor(
                [table + [UNDEFINED_PAGE] * (width - len(table)) for table in self.tables], dtype=torch.int32
            ),
            kv_slots=torch.tensor(slots),
            logit_rows=torch.empty(0, dtype=torch.int64),
            num_decode_rows=0,
        )

    def run(self, spec: AttentionSpec, *, one_query: bool = False) -> torch.Tensor:
        backend = ReferenceAttention(self.cache, one_query=one_query)
        backend.plan(self.batch)
        k = torch.cat([self.keys[row][cached:] for row, (cached, _) in enumerate(self.rows)])
        v = torch.cat([self.values[row][cached:] for row, (cached, _) in enumerate(self.rows)])
        return backend.forward(1, self.queries, k, v, spec)

    def expected(self, spec: AttentionSpec) -> torch.Tensor:
        """One query and one head at a time, in double precision."""
        out, index = torch.empty(self.queries.shape, dtype=torch.float64), 0
        for row, (cached, new) in enumerate(self.rows):
            for position in range(cached, cached + new):
                first = max(position - spec.sliding_window + 1, 0) if spec.sliding_window else 0
                for head in range(self.heads):
                    kv_head = head * self.kv_heads // self.heads
                    keys = self.keys[row][first : position + 1, kv_head].double()
                    scores = keys @ self.queries[index, head].double() * spec.scale
                    if spec.soft_cap:
                        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
                    out[index, head] = scores.softmax(0) @ self.values[row][first : position + 1, kv_head].double()
                index += 1
        return out


rows = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=5)
specs = st.builds(
    AttentionSpec,
    scale=st.sampled_from([DIM**-0.5, 0.1]),
    sliding_window=st.sampled_from([0, 1, 5, 17]),
    soft_cap=st.sampled_from([0.0, 1.5]),
)


@settings(max_examples=60, deadline=None)
@given(
    rows=rows,
    spec=specs,
    page_size=st.sampled_from([1, 4, 16]),
    groups=st.sampled_from([(1, 1), (2, 4), (3, 9), (4, 4)]),
    one_query=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_a_naive_loop(
    rows: list[tuple[int, int]],
    spec: AttentionSpec,
    page_size: int,
    groups: tuple[int, int],
    one_query: bool,
    seed: int,
) -> None:
    scene = Scene(rows, page_size, *groups, seed, torch.float32)
    actual = scene.run(spec, one_query=one_query)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), scene.expected(spec), rtol=0, atol=2e-6)


def test_long_prefill_crosses_query_blocks() -> None:
    spec = AttentionSpec(scale=0.3, sliding_window=70)
    scene = Scene([(3, 2 * QUERY_BLOCK + 5), (0, QUERY_BLOCK)], 16, 2, 4, 1, torch.float32)
    torch.testing.assert_close(scene.run(spec).double(), scene.expected(spec), rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_in_fp32(dtype: torch.dtype) -> None:
    spec = AttentionSpec(scale=DIM**-0.5)
    scene = Scene([(30, 1), (5, 12)], 4, 2, 4, 3, dtype)
    actual = scene.run(spec)
    assert actual.dtype is dtype
    assert torch.equal(actual, scene.expected(spec).to(dtype)) or torch.allclose(
        actual.double(), scene.expected(spec), rtol=torch.finfo(dtype).eps, atol=1e-6
    )


def test_writes_exactly_the_planned_slots() -> None:
    scene = Scene([(6, 3), (0, 5)], 4, 2, 4, 5, torch.float32)
    before = [layer.clone() for layer in scene.cache.layers]
    scene.run(AttentionSpec(scale=1.0))
    assert torch.equal(scene.cache.layers[0].isnan(), before[0].isnan())
    after = scene.cache.layers[1].transpose(2, 3).reshape(-1, 2, 4, 2, DIM).transpose(1, 2).reshape(-1, 2, 2, DIM)
    old = before[1].transpose(2, 3).reshape(-1, 2, 4, 2, DIM).transpose(1, 2).reshape(-1, 2, 2, DIM)
    changed = ~((after == old) | (after.isnan() & old.isnan())).flatten(1).all(1)
    assert sorted(changed.nonzero().flatten().tolist()) == sorted(scene.batch.kv_slots.tolist())
    assert torch.equal(after[scene.batch.kv_slots][:3, 0], scene.keys[0][6:])
    assert torch.equal(after[scene.batch.kv_slots][3:, 1], scene.values[1])
