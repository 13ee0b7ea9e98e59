"""Fixed buffers: what was captured once gives each later batch's results after nothing but a plan."""

from __future__ import annotations

import pytest
import torch

from services.gpu_worker.attention.base import AttentionSpec
from services.gpu_worker.attention.reference import ReferenceAttention
from tests.gpu_worker.flashinfer_fake import FakeFlashInfer, Refused
from tests.gpu_worker.flashinfer_scene import EXACT, FREE, Scene

SPECS = (AttentionSpec(0.125), AttentionSpec(0.2, 20), AttentionSpec(0.125))


def test_replays_follow_the_plan() -> None:
    first, later = Scene([40, 7, 33], specs=SPECS, seed=1), Scene([5, 64, 17], specs=SPECS, seed=2)
    api, cache = FakeFlashInfer(float32=True), first.cache()
    graph = first.backend(api, cache).graph_backend(3, 4)
    graph.plan(first.batch())
    with api.capture() as calls:
        out = [graph.forward(layer, first.q, first.k, first.v, spec) for layer, spec in enumerate(SPECS)]
    torch.testing.assert_close(out, first.expected(), **EXACT)
    addresses = [tensor.data_ptr() for tensor in out]
    for scene in (later, first, later):
        # A replay's inputs are where they were when it was captured.
        for mine, new in ((first.q, scene.q), (first.k, scene.k), (first.v, scene.v)):
            mine.copy_(new)
        for layer in cache.layers:
            layer[: len(scene.contents)] = scene.contents[: len(layer)]
        expected = ReferenceAttention(cache)
        graph.plan(scene.batch())
        for call in calls:
            call()
        actual = [tensor.clone() for tensor in out]
        torch.testing.assert_close(actual, scene.layers(expected), **EXACT)
    assert [tensor.data_ptr() for tensor in out] == addresses


def test_other_batches_are_refused() -> None:
    scene = Scene([40, 7])
    attention = scene.backend(FakeFlashInfer(float32=True))
    with pytest.raises(ValueError, match="3 decode rows"):
        attention.graph_backend(3, 4).plan(scene.batch())
    with pytest.raises(ValueError, match="at most 2 pages"):
        attention.graph_backend(2, 2).plan(scene.batch())
    mixed = Scene([40], [(0, 3)])
    with pytest.raises(ValueError, match="2 decode rows"):
        mixed.backend(FakeFlashInfer(float32=True)).graph_backend(2, 4).plan(mixed.batch())


def test_planning_within_a_capture_is_refused_by_the_fake() -> None:
    scene, api = Scene([40, 7]), FakeFlashInfer(float32=True)
    graph = scene.backend(api).graph_backend(2, 4)
    with api.capture(), pytest.raises(Refused, match="captured"):
        graph.plan(scene.batch())


def test_bytes_are_counted_once_a_plan() -> None:
    scene = Scene([40, 7], specs=SPECS)
    attention = scene.backend(FakeFlashInfer(float32=True))
    graph = attention.graph_backend(2, 4)
    for _ in range(2):
        scene.layers(graph)
    assert attention.kv_bytes_read == graph.kv_bytes_read == 2 * (2 * 47 + 20 + 7) * 2 * 2 * 64 * 4


def test_groups_are_read_row_by_row() -> None:
    scene, api = Scene([70, 60], [], [([0, 1], 3)]), FakeFlashInfer(float32=True)
    graph = scene.backend(api, costs=FREE).graph_backend(2, 5)
    torch.testing.assert_close(scene.layers(graph), scene.expected(), **EXACT)
    assert "merge_state_in_place" not in api.calls


def test_graphs_of_other_sizes_between_replays() -> None:
    """They share their index buffers, and each replay follows its own plan."""
    large, small = Scene([40, 7, 33, 9], seed=1), Scene([20, 31], seed=2)
    api, cache = FakeFlashInfer(float32=True), large.cache()
    attention, captured = large.backend(api, cache), {}
    for scene in (large, small):
        graph = attention.graph_backend(len(scene.decodes), 4)
        graph.plan(scene.batch())
        with api.capture() as calls:
            out = graph.forward(0, scene.q, scene.k, scene.v, scene.specs[0])
        captured[len(scene.decodes)] = graph, calls, out
    for scene in (small, large, small):
        cache.layers[0].zero_()[: len(scene.contents)] = scene.contents
        graph, calls, out = captured[len(scene.decodes)]
        graph.plan(scene.batch())
        for call in calls:
            call()
        torch.testing.assert_close(out, scene.expected()[0], **EXACT)


def test_graphs_of_several_sizes_and_eager_steps_share_a_cache() -> None:
    scene = Scene([40, 7])
    api, cache = FakeFlashInfer(float32=True), scene.cache()
    attention = scene.backend(api, cache)
    graphs = {size: attention.graph_backend(size, 4) for size in (1, 2, 4)}
    for backend in (graphs[2], attention, graphs[2]):
        torch.testing.assert_close(scene.layers(backend), scene.expected(), **EXACT)
