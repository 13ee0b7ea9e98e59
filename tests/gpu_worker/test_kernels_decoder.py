"""The whole-step call against the same layers in float64, and its independence of rows, chunks and threads."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from services.gpu_worker.attention.base import AttentionSpec
from services.gpu_worker.attention.native import NativeAttention
from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.kernels import library
from services.gpu_worker.kernels.decoder import LayerWeights, NativeDecoder
from services.gpu_worker.kernels.logits import Blocks
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.layers.packed_linear import PackedLinear
from services.gpu_worker.layers.rotary import RopeConfig, Rotary, RotaryTables

LIBRARY = library.load()
HIDDEN, INTER, HEADS, KV_HEADS, DIM, LAYERS, PAGE, EPS = 96, 112, 6, 2, 32, 2, 16, 1e-5
VOCAB, CONTEXT = 500, 512
BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15}


@pytest.fixture(autouse=True)
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RotaryTables, "FIRST_ROWS", 8)


@pytest.fixture(params=library.available_isas(LIBRARY.functions))
def kernels(request: pytest.FixtureRequest) -> library.Library:
    return library.Library(LIBRARY.functions, request.param)


class Model:
    """Random weights, plain and packed."""

    def __init__(self, kernels: library.Library, dtype: torch.dtype, *, bias: bool, qk_norm: bool, rope: bool) -> None:
        torch.manual_seed(0)
        self.dtype, self.rope = dtype, rope
        shapes = [((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), (HIDDEN, HEADS * DIM), (2 * INTER, HIDDEN), (HIDDEN, INTER)]
        self.plain, layers = [], []
        for _ in range(LAYERS):
            weights = [(torch.randn(o, i) / math.sqrt(i)).to(dtype) for o, i in shapes]
            biases = [torch.randn(o).to(dtype) if bias else None for o, _ in shapes]
            norms = [torch.rand(HIDDEN).add(0.5).to(dtype) for _ in range(2)]
            qk = torch.rand(HEADS + KV_HEADS, DIM).add(0.5).to(dtype) if qk_norm else None
            self.plain.append((weights, biases, norms, qk))
            packed = [
                PackedLinear(kernels, w, b, gated=i == 2) for i, (w, b) in enumerate(zip(weights, biases, strict=True))
            ]
            layers.append(LayerWeights(*packed, *norms, qk, AttentionSpec(DIM**-0.5), rope))
        self.embedding = torch.empty(VOCAB, HIDDEN, dtype=dtype)
        rope = RopeConfig("default", 100, DIM, CONTEXT)
        self.rotary = Rotary(rope, CONTEXT, torch.device("cpu"), deterministic=False)
        tables = RotaryTables(self.rotary, CONTEXT)
        self.native = NativeDecoder(kernels, layers, self.embedding, tables, q_heads=HEADS, eps=EPS)

    def ids(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens whose embeddings are x [n, HIDDEN]."""
        self.embedding[: len(x)] = x
        return torch.arange(len(x))

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """One row's tokens from position 0, in float64."""
        x, count = x.double(), x.shape[0]
        cos, sin = (table[:, None].double() for table in self.rotary.halves(torch.arange(count)))
        for weights, biases, norms, qk_norm in self.plain:
            qkv, output, gate_up, down = (
                lambda y, w=w, b=b: F.linear(y, w.double(), None if b is None else b.double())
                for w, b in zip(weights, biases, strict=True)
            )
            heads = qkv(normed(x, norms[0])).view(count, -1, DIM)
            qk, v = heads[:, :-KV_HEADS], heads[:, -KV_HEADS:]
            if qk_norm is not None:
                qk = normed(qk, qk_norm)
            if self.rope:
                a, b = qk.chunk(2, -1)
                qk = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
            q, k, v = (t.transpose(0, 1)[None] for t in (qk[:, :HEADS], qk[:, HEADS:], v))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + output(mixed[0].transpose(0, 1).reshape(count, -1))
            gate, up = gate_up(normed(x, norms[1])).chunk(2, -1)
            x = x + down(F.silu(gate) * up)
        return x

    def steps(self, x: torch.Tensor, ends: list[int], beside: int = 0, **kept: Any) -> torch.Tensor:
        """The tokens in chunks that end at `ends`, each beside other rows of one token; the last chunk's outputs.

        `kept`: what else the step takes, such as other tokens to keep.
        """
        pages = math.ceil(x.shape[0] / PAGE)
        cache = KVCache(LAYERS, pages + beside, PAGE, KV_HEADS, DIM, self.dtype, torch.device("cpu"))
        attention = NativeAttention(cache, library_of(self.native))
        out = torch.empty(0)
        for start, end in pairwise([0, *ends]):
            new = end - start
            tables = torch.zeros(beside + 1, pages, dtype=torch.int32)
            tables[:beside, 0] = torch.arange(pages, pages + beside)
            tables[beside] = torch.arange(pages)
            positions = torch.cat([torch.zeros(beside, dtype=torch.int64), torch.arange(start, end)])
            slots = torch.cat([torch.arange(pages, pages + beside) * PAGE, torch.arange(start, end)])
            batch = ForwardBatch(
                token_ids=positions,
                positions=positions,
                qo_indptr=torch.tensor([*range(beside + 1), beside + new], dtype=torch.int32),
                kv_lengths=torch.tensor([1] * beside + [end], dtype=torch.int32),
                page_tables=tables,
                kv_slots=slots,
                logit_rows=torch.arange(beside, beside + new),
                num_decode_rows=beside,
            )
            attention.plan(batch)
            others = torch.randn(beside, HIDDEN).to(self.dtype)
            ids = self.ids(torch.cat([others, x[start:end]]))
            out = self.native.forward(ids, positions, **{"keep": batch.logit_rows, "attention": attention, **kept})
        return out


def library_of(native: NativeDecoder) -> library.Library:
    return library.Library(
        LIBRARY.functions, next(name for name, number in library.ISAS.items() if number == native._isa)
    )


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight.double()


@BOTH
@pytest.mark.parametrize(
    ("bias", "qk_norm", "rope"), [(False, False, True), (True, False, True), (False, True, True), (False, False, False)]
)
@pytest.mark.parametrize("count", [1, 20, 70])
def test_layers(
    kernels: library.Library, dtype: torch.dtype, bias: bool, qk_norm: bool, rope: bool, count: int
) -> None:
    model = Model(kernels, dtype, bias=bias, qk_norm=qk_norm, rope=rope)
    x = torch.randn(count, HIDDEN).to(dtype)
    out, expected = model.steps(x, [count]), model.expected(x)
    assert out.dtype == dtype
    assert (out.double() - expected).abs().max() < TOLERANCE[dtype] * max(1, expected.abs().max().item() / 4)


@BOTH
@pytest.mark.parametrize("threads", [1, 2])
def test_a_token_does_not_depend_on_chunks_rows_or_threads(
    kernels: library.Library, dtype: torch.dtype, threads: int
) -> None:
    model = Model(kernels, dtype, bias=True, qk_norm=True, rope=True)
    x, before = torch.randn(80, HIDDEN).to(dtype), torch.get_num_threads()
    expected = model.steps(x, [80])
    try:
        torch.set_num_threads(threads)
        assert torch.equal(model.steps(x, [7, 79, 80])[-1], expected[-1])
        assert torch.equal(model.steps(x, [40, 80], beside=5)[-40:], expected[-40:])
        assert torch.equal(model.steps(x, [79, 80], beside=40)[-1], expected[-1])
    finally:
        torch.set_num_threads(before)


@BOTH
@pytest.mark.parametrize("threads", [1, 2])
def test_many_rows_have_the_bits_of_chunks(kernels: library.Library, dtype: torch.dtype, threads: int) -> None:
    model = Model(kernels, dtype, bias=True, qk_norm=True, rope=True)
    x, before = torch.randn(330, HIDDEN).to(dtype), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        expected = model.steps(x, [110, 220, 330])  # too few for a thread to have rows of its own
        assert torch.equal(model.steps(x, [330])[-110:], expected)
        assert torch.equal(model.steps(x, [40, 330], beside=9)[-110:], expected)
    finally:
        torch.set_num_threads(before)


@BOTH
def test_only_wanted_rows_come_out(kernels: library.Library, dtype: torch.dtype) -> None:
    model = Model(kernels, dtype, bias=False, qk_norm=False, rope=True)
    x = torch.randn(50, HIDDEN).to(dtype)
    expected = model.steps(x, [50])
    cache = KVCache(LAYERS, 4, PAGE, KV_HEADS, DIM, dtype, torch.device("cpu"))
    attention, positions = NativeAttention(cache, library_of(model.native)), torch.arange(50)
    batch = ForwardBatch(
        positions,
        positions,
        torch.tensor([0, 50], dtype=torch.int32),
        torch.tensor([50], dtype=torch.int32),
        torch.arange(4, dtype=torch.int32)[None],
        positions,
        torch.tensor([49, 3]),
        0,
    )
    for keep in (torch.tensor([49, 3]), torch.tensor([], dtype=torch.int64)):
        attention.plan(batch)
        assert torch.equal(model.native.forward(model.ids(x), positions, keep, attention), expected[keep])
    model.native.forward(model.ids(x), positions * 3 + 100, torch.tensor([0]), attention)  # the tables grow
    with pytest.raises(ValueError, match="keep"):
        model.native.forward(model.ids(x), positions, torch.tensor([50]), attention)
    with pytest.raises(ValueError, match="tokens"):
        model.native.forward(model.ids(x[:9]), positions[:9], torch.tensor([0]), attention)
    for strange in (-1, VOCAB):
        with pytest.raises(ValueError, match="vocabulary"):
            model.native.forward(model.ids(x).index_fill(0, torch.tensor([7]), strange), positions, keep, attention)
    for strange in (-1, CONTEXT):
        with pytest.raises(ValueError, match="position"):
            model.native.forward(model.ids(x), positions.index_fill(0, torch.tensor([7]), strange), keep, attention)


@BOTH
@pytest.mark.parametrize("count", [1, 8, 40])
def test_tokens_may_be_kept_more_than_once(
    kernels: library.Library, dtype: torch.dtype, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a feed-forward so wide that the rows beyond those of the tokens leave what is there for these."""
    monkeypatch.setitem(globals(), "INTER", 6144)
    model = Model(kernels, dtype, bias=False, qk_norm=False, rope=True)
    x, keep = torch.randn(count, HIDDEN).to(dtype), torch.arange(count)
    expected = model.steps(x, [count], keep=keep)
    assert expected.isfinite().all()
    assert torch.equal(model.steps(x, [count], keep=keep.repeat(3)), expected.repeat(3, 1))


@BOTH
@pytest.mark.parametrize("count", [1, 20, 330])
def test_the_head_runs_in_the_same_call(kernels: library.Library, dtype: torch.dtype, count: int) -> None:
    model = Model(kernels, dtype, bias=False, qk_norm=False, rope=True)
    x, keep = torch.randn(count, HIDDEN).to(dtype), torch.tensor([count - 1, 0])
    head = PackedLinear(kernels, (torch.randn(VOCAB, HIDDEN) / math.sqrt(HIDDEN)).to(dtype))
    norm = torch.rand(HIDDEN).add(0.5).to(dtype)
    states, blocks = model.steps(x, [count], keep=keep), Blocks.empty(kernels, 2, VOCAB)
    expected = head.forward(states, norm=norm, eps=EPS, float32=True, blocks=blocks)
    found, out, logits = Blocks.empty(kernels, 2, VOCAB), torch.empty_like(states), torch.empty_like(expected)
    call = head.prepared(out, logits, norm=norm, eps=EPS, blocks=found)
    assert model.steps(x, [count], keep=keep, out=out, head=call) is out
    assert torch.equal(out, states)
    assert torch.equal(logits, expected)
    assert torch.equal(found.peaks, blocks.peaks)
    with pytest.raises(ValueError, match="head"):
        model.steps(x, [count], keep=keep.repeat(2), out=out.repeat(2, 1), head=call)
