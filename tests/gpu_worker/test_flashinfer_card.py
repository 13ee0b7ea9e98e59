"""FlashInfer itself on a card against the reference: what the fake stands for elsewhere."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from services.gpu_worker.attention.base import AttentionSpec
from services.gpu_worker.attention.flashinfer import build
from services.gpu_worker.attention.flashinfer_api import FlashInferApi, import_flashinfer
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.kv_cache import as_bytes
from tests.gpu_worker.flashinfer_scene import FREE, Scene

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),  # the first call of each kind may compile
    pytest.mark.skipif(
        not torch.cuda.is_available() or importlib.util.find_spec("flashinfer") is None,
        reason="needs a CUDA device and flashinfer",
    ),
]

CARD = torch.device("cuda", 0)
HALF = torch.bfloat16
CLOSE = {"rtol": 2e-2, "atol": 1e-2}
FULL, SLIDING = AttentionSpec(128**-0.5), AttentionSpec(128**-0.5, 40)


@pytest.fixture(scope="module")
def api() -> FlashInferApi:
    return import_flashinfer()


def card(decodes: list[int], prefills: list[tuple[int, int]] | None = None, **fields: object) -> Scene:
    """A scene of 8 query heads of 128 on the card."""
    settings = {"dim": 128, "heads": 8, "specs": (FULL,), "dtype": HALF, "device": CARD, **fields}
    return Scene(decodes, prefills or [], **settings)  # type: ignore[arg-type]


def check(api: FlashInferApi, scene: Scene, **options: object) -> None:
    cache, other = scene.cache(), scene.cache()
    actual = scene.layers(scene.backend(api, cache, **options))  # type: ignore[arg-type]
    torch.testing.assert_close(actual, scene.layers(ReferenceAttention(other)), **CLOSE)
    for one, two in zip(cache.layers, other.layers, strict=True):
        assert torch.equal(as_bytes(one), as_bytes(two))


@pytest.mark.parametrize("heads", [4, 8, 10, 18], ids=lambda heads: f"groups of {heads // 2}")
def test_mixed_batches(api: FlashInferApi, heads: int) -> None:
    check(api, card([1, 16, 17, 700, 3000], [(0, 5), (300, 40)], heads=heads))


def test_long_prompts(api: FlashInferApi) -> None:
    check(api, card([20], [(0, 600), (513, 90)]))


def test_many_decode_rows(api: FlashInferApi) -> None:
    check(api, card([31 * row % 517 + 1 for row in range(200)]))


@pytest.mark.parametrize("dim", [64, 256])
def test_head_sizes(api: FlashInferApi, dim: int) -> None:
    check(api, card([100, 33], [(20, 70)], dim=dim, specs=(AttentionSpec(dim**-0.5),)))


def test_windows_and_full_layers(api: FlashInferApi) -> None:
    check(api, card([30, 41, 400], [(0, 100), (200, 20)], specs=(SLIDING, FULL, SLIDING)))


def test_soft_caps(api: FlashInferApi) -> None:
    check(api, card([30, 400], [(0, 100)], specs=(AttentionSpec(128**-0.5, soft_cap=5.0),)))


@pytest.mark.parametrize("groups", [[([0, 1, 2, 3], 40)], [([3, 1], 40), ([2, 0], 12)], [([1, 2], 63)]])
def test_cascades(api: FlashInferApi, groups: list[tuple[list[int], int]]) -> None:
    for prefills in ([], [(10, 30)]):
        check(api, card([1010, 1100, 1200, 1009], prefills, groups=groups), costs=FREE)


TREE = [(range(6), 20), (range(6, 12), 9), ([4, 0, 2], 40), ([9, 7, 8], 30), ([2, 4], 50), ([7, 9], 31)]
"""Rows 1, 3, 5 are in no inner group of the first, 6, 10, 11 in none of the second, 12 in none at all."""


@pytest.mark.parametrize("heads", [4, 8, 10, 18], ids=lambda heads: f"groups of {heads // 2}")
def test_nested_cascades(api: FlashInferApi, heads: int) -> None:
    lengths = [810 + 7 * row for row in range(13)]
    groups = [(list(rows), pages) for rows, pages in TREE]
    scene = card(lengths, [(10, 30)], groups=groups, heads=heads)
    cache = scene.cache()
    attention = scene.backend(api, cache, costs=FREE)
    torch.testing.assert_close(scene.layers(attention), scene.expected(), **CLOSE)
    spared = (5 * 20 + 5 * 9 + 2 * 20 + 2 * 21 + 1 * 10 + 1 * 1) * 16
    assert attention.kv_bytes_read == (sum(lengths) + 40 - spared) * scene.shape().bytes_per_key
    check(api, card(lengths, groups=groups, heads=heads, scales=((0.03, 0.02),)), costs=FREE)


def test_requests_without_pages(api: FlashInferApi) -> None:
    """More than 64 rows between the groups of a level, for which some cards have a kernel of their own."""
    outer = [(list(range(100)), 30), (list(range(100, 200)), 30)]
    inner = [(list(range(10)), 32), (list(range(100, 170)), 31)]
    check(api, card([520 + row % 9 for row in range(200)], groups=outer + inner), costs=FREE)


def test_a_cascade_of_many_rows(api: FlashInferApi) -> None:
    rows = list(range(100))
    check(api, card([520 + row for row in rows], groups=[(rows, 32)]), costs=FREE)


def test_keys_of_8_bits(api: FlashInferApi) -> None:
    scene = card([500, 70], [(20, 12)], groups=[([0, 1], 3)], scales=((0.03, 0.02),))
    check(api, scene)
    check(api, scene, costs=FREE)


def test_loading_tries_it_out(api: FlashInferApi) -> None:
    scene = card([100, 33], [(20, 70)], specs=(FULL, SLIDING))
    assert build(scene.cache(), scene.config, api).kv_bytes_read == 0


@pytest.mark.parametrize("heads", [4, 8], ids=["cuda cores", "tensor cores"])
def test_a_captured_step_follows_its_plans(api: FlashInferApi, heads: int) -> None:
    first = card([40, 700, 33], heads=heads, specs=(FULL, SLIDING), seed=1)
    later = card([500, 4, 270], heads=heads, specs=(FULL, SLIDING), seed=2)
    cache = first.cache()
    graph = first.backend(api, cache).graph_backend(3, 64)
    q, k, v = first.q.clone(), first.k.clone(), first.v.clone()

    def forward() -> list[torch.Tensor]:
        return [graph.forward(layer, q, k, v, spec) for layer, spec in enumerate(first.specs)]

    graph.plan(first.batch())
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward()
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out = forward()
    pages = min(first.num_pages, later.num_pages)
    for scene in (later, first, later):
        if max(page for table in scene.tables for page in table) >= pages:
            pytest.fail("the scenes must have the same number of pages")
        for layer in cache.layers:
            layer[:pages] = scene.contents[:pages]
        for mine, new in ((q, scene.q), (k, scene.k), (v, scene.v)):
            mine.copy_(new)
        graph.plan(scene.batch())
        captured.replay()
        torch.testing.assert_close(out, scene.expected(), **CLOSE)
