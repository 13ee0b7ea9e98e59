"""The native attention against a float64 reference on random ragged batches, on every instruction set present."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch

from services.gpu_worker.attention.base import AttentionSpec
from services.gpu_worker.attention.native import NativeAttention, NativeUnavailable
from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.kernels import library
from services.gpu_worker.kv_cache import KVCache

LIBRARY = library.load()
ISAS = library.available_isas(LIBRARY.functions)
NUM_PAGES = 7  # spare pages beyond those in use
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=ISAS)
def kernels(request: pytest.FixtureRequest) -> library.Library:
    return library.Library(LIBRARY.functions, request.param)


@dataclass
class Case:
    """Rows of (new tokens, cached tokens); everything else is drawn from the seed."""

    rows: list[tuple[int, int]]
    q_heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    window: int = 0
    soft_cap: float = 0.0
    seed: int = 0


@dataclass
class Setup:
    cache: KVCache
    batch: ForwardBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    spec: AttentionSpec


def build(case: Case) -> Setup:
    """A poisoned cache with scattered pages; only the cached tokens of the rows hold numbers."""
    torch.manual_seed(case.seed)
    size, pages_of = case.page_size, [math.ceil((new + old) / case.page_size) for new, old in case.rows]
    num_pages = sum(pages_of) + NUM_PAGES
    cache = KVCache(2, num_pages, size, case.kv_heads, case.head_dim, case.dtype, torch.device("cpu"))
    for layer in cache.layers:
        layer.fill_(math.nan)
    order = torch.randperm(num_pages).tolist()
    tables = torch.full((len(case.rows), max(pages_of) + 2), -123456, dtype=torch.int32)
    slots, positions, indptr = [], [], [0]
    for r, (new, old) in enumerate(case.rows):
        pages = [order.pop() for _ in range(pages_of[r])]
        tables[r, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
        for p in range(old):
            kv = torch.randn(2, case.kv_heads, case.head_dim).to(case.dtype)
            cache.layers[1][pages[p // size], :, :, p % size] = kv
        slots += [pages[p // size] * size + p % size for p in range(old, old + new)]
        positions += range(old, old + new)
        indptr.append(indptr[-1] + new)
    batch = ForwardBatch(
        token_ids=torch.zeros(indptr[-1], dtype=torch.int64),
        positions=torch.tensor(positions),
        qo_indptr=torch.tensor(indptr, dtype=torch.int32),
        kv_lengths=torch.tensor([new + old for new, old in case.rows], dtype=torch.int32),
        page_tables=tables,
        kv_slots=torch.tensor(slots),
        logit_rows=torch.zeros(0, dtype=torch.int64),
        num_decode_rows=sum(new == 1 for new, _ in case.rows),
    )
    fused = torch.randn(indptr[-1], case.q_heads + 2 * case.kv_heads, case.head_dim).to(case.dtype)
    q, k, v = fused.split([case.q_heads, case.kv_heads, case.kv_heads], dim=1)
    spec = AttentionSpec(1 / math.sqrt(case.head_dim), case.window, case.soft_cap)
    return Setup(cache, batch, q, k, v, spec)


def reference(setup: Setup) -> torch.Tensor:
    """Row by row in float64, from the cache as it is after the step."""
    layer, batch, spec = setup.cache.layers[1].double(), setup.batch, setup.spec
    size, group = setup.cache.page_size, setup.q.shape[1] // setup.k.shape[1]
    out = torch.empty(setup.q.shape, dtype=torch.float64)
    for r in range(batch.num_rows):
        first, last = int(batch.qo_indptr[r]), int(batch.qo_indptr[r + 1])
        length = int(batch.kv_lengths[r])
        table = batch.page_tables[r].tolist()
        rows = torch.stack([layer[table[p // size], :, :, p % size] for p in range(length)])
        keys, values = rows[:, 0].repeat_interleave(group, 1), rows[:, 1].repeat_interleave(group, 1)
        scores = torch.einsum("thd,phd->htp", setup.q[first:last].double(), keys) * spec.scale
        if spec.soft_cap:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        query = torch.arange(length - (last - first), length)[:, None]
        key = torch.arange(length)[None]
        hidden = key > query
        if spec.sliding_window:
            hidden |= key <= query - spec.sliding_window
        scores.masked_fill_(hidden, -math.inf)
        out[first:last] = torch.einsum("htp,phd->thd", scores.softmax(-1), values)
    return out


def run(setup: Setup, kernels: library.Library) -> torch.Tensor:
    attention = NativeAttention(setup.cache, kernels)
    attention.plan(setup.batch)
    return attention.forward(1, setup.q, setup.k, setup.v, setup.spec)


def check(case: Case, kernels: library.Library) -> None:
    setup = build(case)
    out = run(setup, kernels)
    assert out.dtype == case.dtype
    flat = setup.cache.layers[1].transpose(1, 3).reshape(-1, case.kv_heads, 2, case.head_dim)
    assert torch.equal(flat[setup.batch.kv_slots, :, 0], setup.k)
    assert torch.equal(flat[setup.batch.kv_slots, :, 1], setup.v)
    expected = reference(setup)
    assert torch.isfinite(out).all()
    error = (out.double() - expected).abs().max().item()
    assert error < TOLERANCE[case.dtype], f"{case}: {error}"
    assert torch.isnan(setup.cache.layers[0]).all(), "another layer was touched"


BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@BOTH
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256, 40, 33])
def test_head_sizes(kernels: library.Library, dtype: torch.dtype, head_dim: int) -> None:
    check(Case([(1, 40), (1, 0), (19, 30)], 4, 2, head_dim, dtype=dtype), kernels)


@BOTH
@pytest.mark.parametrize("page_size", [1, 2, 3, 8, 16, 32, 48, 64])
def test_page_sizes(kernels: library.Library, dtype: torch.dtype, page_size: int) -> None:
    check(Case([(1, 70), (1, 15), (1, 16), (1, 17), (40, 0), (17, 47)], page_size=page_size, dtype=dtype), kernels)


@BOTH
@pytest.mark.parametrize("group", [1, 2, 4, 7, 8, 16, 24])
def test_group_sizes(kernels: library.Library, dtype: torch.dtype, group: int) -> None:
    check(Case([(1, 33), (5, 20), (30, 3)], 2 * group, 2, 32, dtype=dtype), kernels)


@BOTH
def test_contexts_of_several_blocks(kernels: library.Library, dtype: torch.dtype) -> None:
    check(Case([(1, 511), (1, 512), (1, 1500), (3, 1022), (70, 600)], 3, 1, dtype=dtype), kernels)


@pytest.mark.parametrize("chunk", [129, 256, 500])
@pytest.mark.parametrize("start", [0, 500, 744, 1001])
def test_tiles_that_straddle_a_block(kernels: library.Library, chunk: int, start: int) -> None:
    """The last tile of a full item has lanes that end before a block and lanes that begin in it."""
    check(Case([(chunk, start), (1, 40)], dtype=torch.float32), kernels)


@BOTH
@pytest.mark.parametrize("window", [1, 7, 16, 100, 513])
def test_sliding_window(kernels: library.Library, dtype: torch.dtype, window: int) -> None:
    check(Case([(1, 40), (1, 1200), (50, 0), (9, 700)], 4, 2, 32, dtype=dtype, window=window), kernels)


@BOTH
def test_soft_cap(kernels: library.Library, dtype: torch.dtype) -> None:
    check(Case([(1, 200), (33, 20)], dtype=dtype, soft_cap=1.5), kernels)


@BOTH
def test_128_decode_rows(kernels: library.Library, dtype: torch.dtype) -> None:
    draw = random.Random(3)
    check(Case([(1, draw.randrange(80)) for _ in range(128)], 2, 1, 32, dtype=dtype), kernels)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(kernels: library.Library, seed: int) -> None:
    draw = random.Random(seed)
    rows = [(1, draw.randrange(150)) for _ in range(draw.randrange(6))]
    rows += [(draw.randrange(1, 90), draw.choice([0, draw.randrange(120)])) for _ in range(draw.randrange(1, 4))]
    kv_heads = draw.choice([1, 2, 3])
    case = Case(
        rows,
        kv_heads * draw.choice([1, 3, 5]),
        kv_heads,
        draw.choice([16, 48, 64, 72]),
        draw.choice([1, 4, 16, 32]),
        draw.choice([torch.float32, torch.bfloat16]),
        draw.choice([0, 0, 20]),
        draw.choice([0.0, 0.0, 5.0]),
        seed,
    )
    check(case, kernels)


@BOTH
def test_weights_are_unbiased(kernels: library.Library, dtype: torch.dtype) -> None:
    """Two keys, V of 0 and 1: the output is the second key's weight, at score differences all over a sweep."""
    count = 512
    cache = KVCache(2, count, 16, 1, 32, dtype, torch.device("cpu"))
    zeros, ones = torch.zeros(count, dtype=torch.int64), torch.ones(count, dtype=torch.int64)
    pages = torch.arange(count, dtype=torch.int32)
    indptr = torch.arange(count + 1, dtype=torch.int32)
    batch = ForwardBatch(zeros, ones, indptr, 2 * ones.int(), pages[:, None], pages * 16 + ones, zeros[:0], count)
    q, k, v = torch.zeros(3, count, 1, 32, dtype=dtype)
    q[:, :, 0], k[:, 0, 0], v[:] = 1, torch.linspace(-9, 0, count), 1
    out = run(Setup(cache, batch, q, k, v, AttentionSpec(1.0)), kernels)[:, 0, 0].double()
    error = out / k[:, 0, 0].double().sigmoid() - 1
    assert error.abs().max() < (1e-5 if dtype == torch.float32 else 1e-2)
    assert error.mean().abs() < (1e-6 if dtype == torch.float32 else 1.5e-3)


@BOTH
def test_results_depend_on_the_query_alone(kernels: library.Library, dtype: torch.dtype) -> None:
    """Decode, append and whole prefill of the same tokens, alone or not, on one thread or two: the same bits."""
    case = Case([(1100, 0)], 3, 1, dtype=dtype)
    whole = build(case)
    expected = run(whole, kernels)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            for new in (1, 5, 300):
                part = _tail_of(whole, new, beside=count)
                assert torch.equal(run(part, kernels)[-new:], expected[-new:])
    finally:
        torch.set_num_threads(threads)


def _tail_of(setup: Setup, new: int, beside: int) -> Setup:
    """The last `new` tokens of a one-row step again, after `beside` other decode rows over the same pages."""
    total = setup.batch.num_tokens
    batch = ForwardBatch(
        token_ids=torch.zeros(new + beside, dtype=torch.int64),
        positions=torch.zeros(new + beside, dtype=torch.int64),
        qo_indptr=torch.tensor([*range(beside + 1), beside + new], dtype=torch.int32),
        kv_lengths=torch.tensor([10] * beside + [total], dtype=torch.int32),
        page_tables=setup.batch.page_tables.repeat(beside + 1, 1),
        kv_slots=torch.cat([setup.batch.kv_slots[9:10].repeat(beside), setup.batch.kv_slots[-new:]]),
        logit_rows=torch.zeros(0, dtype=torch.int64),
        num_decode_rows=beside,
    )
    take = torch.tensor([9] * beside + list(range(total - new, total)))
    return Setup(setup.cache, batch, setup.q[take], setup.k[take], setup.v[take], setup.spec)


def test_wrong_batches_are_refused() -> None:
    setup = build(Case([(1, 20), (4, 4)]))
    setup.batch.page_tables[0, 1] = 10**6
    with pytest.raises(ValueError, match="page table"):
        run(setup, LIBRARY)
    setup = build(Case([(1, 20), (4, 4)]))
    setup.batch.kv_slots[0] = -1
    with pytest.raises(ValueError, match="slot"):
        run(setup, LIBRARY)


def test_kv_bytes_are_counted() -> None:
    setup = build(Case([(1, 99), (1, 49)]))
    attention = NativeAttention(setup.cache, LIBRARY)
    attention.plan(setup.batch)
    for layer in (0, 1):
        attention.forward(layer, setup.q, setup.k, setup.v, setup.spec)
    assert attention.kv_bytes_read == 2 * (100 + 50) * 2 * 3 * 64 * 2


def test_float16_is_not_native() -> None:
    cache = KVCache(1, 2, 16, 1, 16, torch.float16, torch.device("cpu"))
    with pytest.raises(NativeUnavailable, match="float16"):
        NativeAttention(cache, LIBRARY)


@BOTH
@pytest.mark.parametrize(("start", "count"), [(249, 8), (505, 8), (500, 13), (504, 16), (482, 31), (761, 20)])
@pytest.mark.parametrize("threads", [1, 2])
def test_tokens_of_a_chunk_that_straddles_a_block_have_the_bits_they_have_alone(
    kernels: library.Library, dtype: torch.dtype, start: int, count: int, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        setup = build(Case([(count, start)], dtype=dtype))
        together, batch = run(setup, kernels), setup.batch
        attention = NativeAttention(setup.cache, kernels)
        for i in range(count):
            one = ForwardBatch(
                token_ids=batch.token_ids[:1],
                positions=batch.positions[i : i + 1],
                qo_indptr=torch.tensor([0, 1], dtype=torch.int32),
                kv_lengths=torch.tensor([start + i + 1], dtype=torch.int32),
                page_tables=batch.page_tables,
                kv_slots=batch.kv_slots[i : i + 1],
                logit_rows=batch.logit_rows,
                num_decode_rows=1,
            )
            attention.plan(one)
            q, k, v = (part[i : i + 1] for part in (setup.q, setup.k, setup.v))
            assert torch.equal(attention.forward(1, q, k, v, setup.spec)[0], together[i]), f"token {i}"
    finally:
        torch.set_num_threads(before)
