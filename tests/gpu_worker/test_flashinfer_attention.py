"""FlashInfer's backend over a fake of it against the reference: random ragged batches, windows, caps, head shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from services.gpu_worker.attention.base import AttentionSpec, GraphAttention
from services.gpu_worker.attention.cascade import CascadeCosts
from services.gpu_worker.attention.page_lists import keys_read, page_spans
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.kv_cache import as_bytes
from tests.gpu_worker.flashinfer_fake import FakeFlashInfer, Refused
from tests.gpu_worker.flashinfer_scene import EXACT, FREE, Scene


def check(scene: Scene) -> FakeFlashInfer:
    api, cache, other = FakeFlashInfer(float32=True), scene.cache(), scene.cache()
    actual = scene.layers(scene.backend(api, cache))
    expected = scene.layers(ReferenceAttention(other))
    for one, two in zip(actual, expected, strict=True):
        assert one.dtype == scene.dtype
        assert one.is_contiguous()
        torch.testing.assert_close(one, two, **EXACT)
    for one, two in zip(cache.layers, other.layers, strict=True):
        assert torch.equal(one, two), "K and V were stored elsewhere"
    return api


lengths = st.lists(st.integers(1, 70), max_size=4)
chunks = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), max_size=3)
specs = st.lists(
    st.builds(
        AttentionSpec,
        scale=st.sampled_from([0.125, 0.3]),
        sliding_window=st.sampled_from([0, 0, 1, 9, 40]),
        soft_cap=st.sampled_from([0.0, 0.0, 2.0]),
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=25, deadline=None)
@given(
    decodes=lengths,
    prefills=chunks,
    specs=specs,
    heads=st.sampled_from([(1, 1), (2, 4), (2, 6), (1, 5), (3, 3)]),
    page_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 1000),
)
def test_random_batches_equal_the_reference(
    decodes: list[int],
    prefills: list[tuple[int, int]],
    specs: list[AttentionSpec],
    heads: tuple[int, int],
    page_size: int,
    seed: int,
) -> None:
    assume(decodes or prefills)
    check(
        Scene(
            decodes,
            prefills,
            kv_heads=heads[0],
            heads=heads[1],
            page_size=page_size,
            specs=tuple(specs),
            seed=seed,
        )
    )


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("group", range(1, 10))
def test_head_sizes_and_groups(dim: int, group: int) -> None:
    spec = AttentionSpec(dim**-0.5)
    check(Scene([33, 1], [(3, 9)], kv_heads=2, heads=2 * group, dim=dim, specs=(spec,)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    scene = Scene([40, 17], [(20, 12)], dtype=dtype)
    actual = scene.layers(scene.backend(FakeFlashInfer()))
    torch.testing.assert_close(actual, scene.expected(), rtol=torch.finfo(dtype).eps, atol=1e-3)


@pytest.mark.parametrize("costs", [None, FREE])
def test_keys_of_8_bits_with_scales(costs: CascadeCosts | None) -> None:
    scales = ((0.5, 2.0), (0.03, 0.01))
    scene = Scene([100, 70], [(20, 12)], [([0, 1], 3)], dtype=torch.bfloat16, scales=scales)
    cache, other = scene.cache(), scene.cache()
    actual = scene.layers(scene.backend(FakeFlashInfer(), cache, costs))
    torch.testing.assert_close(
        actual, scene.layers(ReferenceAttention(other)), rtol=2 * torch.finfo(torch.bfloat16).eps, atol=4e-3
    )
    for one, two in zip(cache.layers, other.layers, strict=True):
        assert torch.equal(as_bytes(one), as_bytes(two))


def test_layers_of_equal_spec_share_a_plan() -> None:
    sliding, full = AttentionSpec(0.125, 9), AttentionSpec(0.125)
    api = check(Scene([30], [(0, 4)], specs=(sliding, full, sliding, full, full)))
    assert api.calls.count("BatchDecodeWithPagedKVCacheWrapper.plan") == 2
    assert api.calls.count("BatchPrefillWithPagedKVCacheWrapper.plan") == 2
    assert api.calls.count("BatchDecodeWithPagedKVCacheWrapper.run") == 5


def test_wrappers_and_workspace_are_made_once() -> None:
    api = FakeFlashInfer(float32=True)
    scene = Scene([30, 40], [(0, 4)])
    attention = scene.backend(api)
    made = [call for call in api.calls if call.endswith("__init__")]
    for _ in range(3):
        scene.layers(attention)
    assert [call for call in api.calls if call.endswith("__init__")] == made


def test_bytes_are_counted_layer_by_layer() -> None:
    scene = Scene([100, 50], [(20, 10)], specs=(AttentionSpec(0.125), AttentionSpec(0.125, 16)))
    attention = scene.backend(FakeFlashInfer(float32=True))
    scene.layers(attention)
    full, sliding = 100 + 50 + 30, 16 + 16 + 16 + 10 - 1
    assert attention.kv_bytes_read == (full + sliding) * 2 * 2 * 64 * 4


def test_it_is_a_graph_attention() -> None:
    scene = Scene([3])
    assert isinstance(scene.backend(FakeFlashInfer(float32=True)), GraphAttention)
    assert not isinstance(ReferenceAttention(scene.cache()), GraphAttention)


def test_an_unplanned_spec_is_an_error() -> None:
    scene = Scene([3])
    attention = scene.backend(FakeFlashInfer(float32=True))
    attention.plan(scene.batch())
    with pytest.raises(KeyError):
        attention.forward(0, scene.q, scene.k, scene.v, AttentionSpec(0.7))


def test_rows_beyond_their_tables_are_refused() -> None:
    scene = Scene([20, 40])
    batch = scene.batch()
    batch.kv_lengths[1] = 200
    with pytest.raises(ValueError, match="page table"):
        scene.backend(FakeFlashInfer(float32=True)).plan(batch)
    batch.kv_lengths[1] = 0
    with pytest.raises(ValueError, match="page table"):
        scene.backend(FakeFlashInfer(float32=True)).plan(batch)


def test_page_spans() -> None:
    tables = torch.tensor([[7, 3, 9], [1, 8, 2]], dtype=torch.int32).numpy()
    lengths = torch.tensor([6, 12], dtype=torch.int32).numpy()
    spans = page_spans(lengths, 4, 3)
    assert (spans.indptr.tolist(), spans.pages(tables).tolist()) == ([0, 2, 5], [7, 3, 1, 8, 2])
    assert spans.last_page_len.tolist() == [2, 4]
    cut = page_spans(lengths, 4, 3, torch.tensor([1, 0], dtype=torch.int32).numpy())
    assert (cut.indptr.tolist(), cut.pages(tables).tolist()) == ([0, 1, 4], [3, 1, 8, 2])
    with pytest.raises(ValueError, match="no tokens"):
        page_spans(lengths, 4, 3, torch.tensor([2, 0], dtype=torch.int32).numpy())


@given(rows=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30)), max_size=5), window=st.integers(0, 12))
def test_keys_read_counts_what_is_visible(rows: list[tuple[int, int]], window: int) -> None:
    seen = 0
    for new, cached in rows:
        first = max(cached - window + 1, 0) if window else 0
        seen += cached + new - first
    queries = torch.tensor([new for new, _ in rows], dtype=torch.int32).numpy()
    keys = torch.tensor([new + cached for new, cached in rows], dtype=torch.int32).numpy()
    assert keys_read(queries, keys, window) == seen


def test_the_fake_demands_what_the_real_one_does() -> None:
    """The checks the other tests rely on do fail."""
    scene = Scene([20])
    strict = FakeFlashInfer()
    with pytest.raises(Refused, match="float32"):
        scene.backend(strict).plan(scene.batch())
    attention = Scene([20], dim=80).backend(FakeFlashInfer(float32=True))
    with pytest.raises(Refused, match="head_dim 80"):
        attention.plan(scene.batch())
    with pytest.raises(Refused, match="position"):
        scene.backend(FakeFlashInfer(float32=True)).forward(0, scene.q, scene.k, scene.v, scene.specs[0])
    wrapper = strict.BatchDecodeWithPagedKVCacheWrapper(torch.zeros(128 << 20, dtype=torch.uint8), "HND")
    with pytest.raises(Refused, match="before plan"):
        wrapper.run(scene.q, scene.cache().layers[0], out=torch.empty_like(scene.q))
