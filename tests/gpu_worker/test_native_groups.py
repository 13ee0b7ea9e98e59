"""Shared-prefix decode: rows of a group read their common pages once and get what they would get alone."""

from __future__ import annotations

import math

import pytest
import torch

from services.gpu_worker.attention.base import AttentionSpec
from services.gpu_worker.attention.native import NativeAttention
from services.gpu_worker.batch import ForwardBatch, SharedGroup
from services.gpu_worker.kernels import library
from services.gpu_worker.kv_cache import KVCache

LIBRARY = library.load()
BLOCK = 256  # keys; whole blocks are shared without changing a bit
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=library.available_isas(LIBRARY.functions))
def kernels(request: pytest.FixtureRequest) -> library.Library:
    return library.Library(LIBRARY.functions, request.param)


class Step:
    """Decode rows over a common prefix of `shared` pages with private tails of `tails` tokens, then one prefill row."""

    def __init__(
        self, shared: int, tails: list[int], *, heads: int = 9, kv_heads: int = 3, dim: int = 64, page_size: int = 16
    ) -> None:
        torch.manual_seed(0)
        self.shared, self.page_size, self.heads, self.kv_heads, self.dim = shared, page_size, heads, kv_heads, dim
        self.lengths = [shared * page_size + tail for tail in tails] + [40]
        pages = [math.ceil(length / page_size) for length in self.lengths]
        self.num_pages = sum(pages) + 3
        order, width = torch.randperm(self.num_pages).tolist(), max(pages) + 1
        prefix = [order.pop() for _ in range(shared)]
        self.tables = torch.full((len(pages), width), -1, dtype=torch.int32)
        for r, count in enumerate(pages):
            own = (
                prefix + [order.pop() for _ in range(count - shared)]
                if r < len(tails)
                else [order.pop() for _ in range(count)]
            )
            self.tables[r, :count] = torch.tensor(own, dtype=torch.int32)
        self.new = [1] * len(tails) + [30]
        self.rows = torch.arange(len(tails), dtype=torch.int32)

    def batch(self, groups: tuple[SharedGroup, ...]) -> ForwardBatch:
        slots, size = [], self.page_size
        for r, (length, new) in enumerate(zip(self.lengths, self.new, strict=True)):
            slots += [int(self.tables[r, p // size]) * size + p % size for p in range(length - new, length)]
        return ForwardBatch(
            token_ids=torch.zeros(len(slots), dtype=torch.int64),
            positions=torch.zeros(len(slots), dtype=torch.int64),
            qo_indptr=torch.tensor([0, *torch.tensor(self.new).cumsum(0).tolist()], dtype=torch.int32),
            kv_lengths=torch.tensor(self.lengths, dtype=torch.int32),
            page_tables=self.tables,
            kv_slots=torch.tensor(slots),
            logit_rows=torch.zeros(0, dtype=torch.int64),
            num_decode_rows=len(self.rows),
            groups=groups,
        )

    def run(
        self,
        kernels: library.Library,
        dtype: torch.dtype,
        groups: tuple[SharedGroup, ...],
        *,
        window: int = 0,
        exact: bool = False,
    ) -> tuple[torch.Tensor, int]:
        """The outputs of the same step each time, and the bytes of K and V read for it."""
        torch.manual_seed(1)
        cache = KVCache(1, self.num_pages, self.page_size, self.kv_heads, self.dim, dtype, torch.device("cpu"))
        cache.layers[0].normal_()
        batch = self.batch(groups)
        tokens = batch.num_tokens
        q, k, v = (torch.randn(tokens, h, self.dim).to(dtype) for h in (self.heads, self.kv_heads, self.kv_heads))
        attention = NativeAttention(cache, kernels, exact_groups=exact)
        attention.plan(batch)
        spec = AttentionSpec(self.dim**-0.5, window)
        first = attention.forward(0, q, k, v, spec)
        read = attention.kv_bytes_read
        assert torch.equal(attention.forward(0, q, k, v, spec), first), "a second layer starts afresh"
        return first, read

    def bytes_of(self, keys: int, dtype: torch.dtype) -> int:
        return keys * 2 * self.kv_heads * self.dim * dtype.itemsize


BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@BOTH
@pytest.mark.parametrize("shared", [1, 15, 16, 17, 40])
@pytest.mark.parametrize("threads", [1, 2])
def test_groups_change_nothing_but_the_reading(
    kernels: library.Library, dtype: torch.dtype, shared: int, threads: int
) -> None:
    step = Step(shared, [1, 5, 16, 17, 300, 2, 33])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        plain, plain_read = step.run(kernels, dtype, ())
        grouped, grouped_read = step.run(kernels, dtype, (SharedGroup(step.rows, shared),))
        exact, _ = step.run(kernels, dtype, (SharedGroup(step.rows, shared),), exact=True)
    finally:
        torch.set_num_threads(before)
    assert (grouped.double() - plain.double()).abs().max() < TOLERANCE[dtype]
    assert torch.equal(exact, plain)
    assert plain_read == step.bytes_of(sum(step.lengths), dtype)
    assert plain_read - grouped_read == step.bytes_of(6 * shared * 16, dtype)


@pytest.mark.parametrize("page_size", [1, 3, 8, 32])
def test_page_sizes(kernels: library.Library, page_size: int) -> None:
    step = Step(37, [1, 2, 50], page_size=page_size)
    plain, _ = step.run(kernels, torch.bfloat16, ())
    grouped, _ = step.run(kernels, torch.bfloat16, (SharedGroup(step.rows, 37),))
    assert (grouped.double() - plain.double()).abs().max() < TOLERANCE[torch.bfloat16]


@BOTH
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 32), (8, 1, 80), (32, 2, 64), (12, 2, 128), (34, 2, 16)])
def test_head_layouts(kernels: library.Library, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    step = Step(20, [3] * 19, heads=heads, kv_heads=kv_heads, dim=dim)
    plain, plain_read = step.run(kernels, dtype, ())
    grouped, grouped_read = step.run(kernels, dtype, (SharedGroup(step.rows, 20),))
    assert (grouped.double() - plain.double()).abs().max() < TOLERANCE[dtype]
    if heads // kv_heads <= 16:  # larger head groups fill a tile alone
        assert grouped_read < plain_read / 4


@BOTH
@pytest.mark.parametrize("window", [8, 100, 400])
def test_sliding_window(kernels: library.Library, dtype: torch.dtype, window: int) -> None:
    step = Step(25, [1, 30, 90, 290])
    plain, _ = step.run(kernels, dtype, (), window=window)
    grouped, _ = step.run(kernels, dtype, (SharedGroup(step.rows, 25),), window=window)
    assert (grouped.double() - plain.double()).abs().max() < TOLERANCE[dtype]


def test_more_rows_than_one_item_holds(kernels: library.Library) -> None:
    step = Step(17, [2] * 150, kv_heads=1, heads=3, dim=32)
    plain, _ = step.run(kernels, torch.bfloat16, ())
    grouped, read = step.run(kernels, torch.bfloat16, (SharedGroup(step.rows, 17),))
    assert (grouped.double() - plain.double()).abs().max() < TOLERANCE[torch.bfloat16]
    assert read == step.bytes_of(2 * 17 * 16 + 150 * 2 + 40, torch.bfloat16)


@BOTH
def test_two_groups_and_rows_outside(kernels: library.Library, dtype: torch.dtype) -> None:
    step = Step(20, [4, 5, 6, 7, 8, 9])
    plain, _ = step.run(kernels, dtype, ())
    groups = (SharedGroup(step.rows[[4, 1]], 20), SharedGroup(step.rows[[0, 5]], 18))
    grouped, _ = step.run(kernels, dtype, groups)
    assert (grouped.double() - plain.double()).abs().max() < TOLERANCE[dtype]
    assert torch.equal(grouped[2:4], plain[2:4])


NESTED = {  # (rows, pages) of nested groups -> those that are read together
    "the outer one": ([(range(6), 18), ([0, 1], 19)], [0]),
    "both inner ones": ([(range(5), 5), ([0, 1], 20), ([4, 2, 3], 15)], [1, 2]),
    "the innermost one of three": ([(range(6), 2), (range(4), 4), ([3, 1, 2], 20)], [2]),
}


@pytest.mark.parametrize("nested", NESTED)
def test_of_nested_groups_those_that_save_most_are_read_together(nested: str) -> None:
    step = Step(20, [4, 5, 6, 7, 8, 9])
    plain, plain_read = step.run(LIBRARY, torch.bfloat16, ())
    groups, best = NESTED[nested]
    shared = [SharedGroup(step.rows[list(rows)], pages) for rows, pages in groups]
    grouped, read = step.run(LIBRARY, torch.bfloat16, tuple(shared))
    assert (grouped.double() - plain.double()).abs().max() < TOLERANCE[torch.bfloat16]
    spared = sum((len(shared[group].rows) - 1) * shared[group].num_pages for group in best)
    assert plain_read - read == step.bytes_of(spared * 16, torch.bfloat16)


def test_rows_that_do_not_belong_are_served_alone() -> None:
    step = Step(20, [4, 5, 6])
    plain, _ = step.run(LIBRARY, torch.bfloat16, ())
    stranger = torch.tensor([0, 1, 2, 3, 0, 99], dtype=torch.int32)  # a prefill row, a repetition, no row at all
    grouped, _ = step.run(LIBRARY, torch.bfloat16, (SharedGroup(stranger, 20), SharedGroup(step.rows, 21)))
    assert (grouped.double() - plain.double()).abs().max() < TOLERANCE[torch.bfloat16]
    step.tables[2, 3] = step.tables[2, 4]  # row 2 has other pages now
    plain, _ = step.run(LIBRARY, torch.bfloat16, ())
    grouped, _ = step.run(LIBRARY, torch.bfloat16, (SharedGroup(step.rows, 20),))
    assert torch.equal(grouped[2], plain[2])
