"""Shared prefixes read once: what is chosen, and that it changes no result."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.attention.base import AttentionSpec
from services.gpu_worker.attention.cascade import Cascade, CascadeCosts, choose
from services.gpu_worker.batch import HostColumns, SharedGroup
from tests.gpu_worker.flashinfer_fake import FakeFlashInfer
from tests.gpu_worker.flashinfer_scene import EXACT, FREE, Scene

PAGE = 16
LLAMA_8B = CascadeCosts(bytes_per_key=2 * 8 * 128 * 2, bytes_per_row=32 * (128 * 2 + 4))


def host(lengths: list[int], groups: list[tuple[list[int], int]]) -> tuple[HostColumns, list[SharedGroup]]:
    width = max(lengths) // PAGE + 1
    tables = 1000 * np.arange(len(lengths))[:, None] + np.arange(width)
    for rows, pages in groups:
        tables[rows, :pages] = tables[rows[0], :pages]
    columns = HostColumns(
        np.arange(len(lengths) + 1, dtype=np.int32),
        np.array(lengths, dtype=np.int32),
        tables.astype(np.int32),
        tuple(np.array(rows, dtype=np.int32) for rows, _ in groups),
    )
    return columns, [SharedGroup(torch.tensor(rows, dtype=torch.int32), pages) for rows, pages in groups]


def chosen(
    lengths: list[int], groups: list[tuple[list[int], int]], costs: CascadeCosts = FREE, window: int = 0
) -> Cascade | None:
    return choose(*host(lengths, groups), len(lengths), PAGE, window, costs)


def test_the_cut() -> None:
    cascade = chosen([100, 50, 90, 60], [([2, 0], 3), ([1, 3], 2)])
    assert cascade is not None
    assert (cascade.order.tolist(), cascade.grouped) == ([2, 0, 1, 3], 4)
    assert cascade.qo_indptr.tolist() == [0, 2, 4]
    assert cascade.skip.tolist() == [3, 2, 3, 2]
    assert cascade.shared.indices.tolist() == [2000, 2001, 2002, 1000, 1001]
    assert (cascade.shared.indptr.tolist(), cascade.shared.last_page_len.tolist()) == ([0, 3, 5], [PAGE, PAGE])
    assert (cascade.shared_keys, cascade.in_order) == (5 * PAGE, False)
    private = cascade.private(host([100, 50, 90, 60], [([2, 0], 3), ([1, 3], 2)])[0], PAGE)
    assert private.indptr.tolist() == [0, 3, 7, 9, 11]
    assert private.indices.tolist() == [2003, 2004, 2005, 3, 4, 5, 6, 1002, 1003, 3002, 3003]


def test_rows_in_order_need_no_gather() -> None:
    for groups, in_order in (([([0, 1], 3)], True), ([([1, 2], 3)], False), ([([1, 0], 3)], False)):
        cascade = chosen([100, 90, 80], groups)
        assert cascade is not None
        assert cascade.in_order == in_order
        assert sorted(cascade.order.tolist()) == [0, 1, 2]


def test_a_group_that_a_window_cuts_is_left_out() -> None:
    groups = [([0, 1], 2), ([2, 3], 2)]
    cascade = chosen([40, 50, 60, 90], groups, window=60)
    assert cascade is not None
    assert cascade.order[: cascade.grouped].tolist() == [0, 1]
    assert chosen([61, 61], [([0, 1], 2)], window=60) is None


@pytest.mark.parametrize(
    ("rows", "pages", "pays"),
    [
        (2, 8, False),  # half a megabyte a layer less, against two kernels
        (2, 200, False),
        (2, 500, True),
        (32, 8, False),
        (32, 11, False),
        (32, 16, True),
        (256, 8, True),
    ],
)
def test_it_must_save_more_than_it_costs(rows: int, pages: int, pays: bool) -> None:
    lengths = [pages * PAGE + 1] * rows
    assert (chosen(lengths, [(list(range(rows)), pages)], LLAMA_8B) is not None) == pays


def test_costs_are_shared_by_all_groups_but_each_must_pay_for_itself() -> None:
    big, small = (list(range(32)), 24), ([32, 33], 24)
    launches = LLAMA_8B.launches(in_order=True) * LLAMA_8B.bytes_per_launch
    assert LLAMA_8B.group_gain(32, 24 * PAGE) > launches > LLAMA_8B.group_gain(2, 24 * PAGE) > 0
    assert chosen([1000] * 2, [([0, 1], 24)], LLAMA_8B) is None
    both = chosen([1000] * 34, [big, small], LLAMA_8B)
    assert both is not None
    assert both.grouped == 34
    tiny = chosen([1000] * 34, [big, ([32, 33], 1)], LLAMA_8B)
    assert tiny is not None
    assert tiny.grouped == 32


def test_rows_out_of_order_must_save_more() -> None:
    lengths = [17 * PAGE] * 40
    assert chosen(lengths, [(list(range(32)), 16)], LLAMA_8B) is not None
    assert chosen(lengths, [(list(range(8, 40)), 16)], LLAMA_8B) is None


lengths = st.lists(st.integers(18, 90), min_size=2, max_size=6)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    decodes = draw(lengths)
    left = draw(st.permutations(range(len(decodes))))
    groups: list[tuple[list[int], int]] = []
    while len(left) >= 2 and draw(st.booleans()):
        count = draw(st.integers(2, len(left)))
        members, left = left[:count], left[count:]
        most = (min(decodes[row] for row in members) - 1) // PAGE
        groups.append((list(members), draw(st.integers(1, most))))
    specs = (
        AttentionSpec(0.125, soft_cap=draw(st.sampled_from([0.0, 3.0]))),
        AttentionSpec(0.2, sliding_window=draw(st.sampled_from([30, 60, 200]))),
    )
    prefills = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=1))
    kv_heads, heads = draw(st.sampled_from([(2, 2), (1, 6)]))
    return Scene(decodes, prefills, groups, kv_heads, heads, specs=specs, seed=draw(st.integers(0, 999)))


@settings(max_examples=25, deadline=None)
@given(scene=scenes())
def test_a_cascade_equals_plain_decode(scene: Scene) -> None:
    actual = scene.layers(scene.backend(FakeFlashInfer(float32=True), costs=FREE))
    torch.testing.assert_close(actual, scene.expected(), **EXACT)


def test_it_does_cascade() -> None:
    scene = Scene([100, 90, 40], [], [([1, 0], 4)])
    api = FakeFlashInfer(float32=True)
    scene.layers(scene.backend(api, costs=FREE))
    assert api.calls.count("merge_state_in_place") == len(scene.specs)
    plain = FakeFlashInfer(float32=True)
    scene.layers(scene.backend(plain))  # by the real rule this saves far too little
    assert "merge_state_in_place" not in plain.calls


def test_a_shared_page_is_counted_once_a_group() -> None:
    scene = Scene([100, 90, 40], [], [([0, 1], 4)], specs=(AttentionSpec(0.125), AttentionSpec(0.125, 16)))
    attention = scene.backend(FakeFlashInfer(float32=True), costs=FREE)
    scene.layers(attention)
    assert attention.kv_bytes_read == (100 + 90 + 40 - 64 + 3 * 16) * 2 * 2 * 64 * 4


def test_steps_with_and_without_groups_alternate() -> None:
    together = Scene([100, 90], [], [([0, 1], 4)])
    attention = together.backend(FakeFlashInfer(float32=True), costs=FREE)
    alone = Scene([100, 90], [], [([0, 1], 4)])
    alone.groups = []
    for scene in (together, alone, together):
        torch.testing.assert_close(scene.layers(attention), together.expected(), **EXACT)


def test_half_precision_rounds_the_parts_only() -> None:
    scene = Scene([100, 90, 70], [], [([0, 2], 4)], dtype=torch.bfloat16)
    actual = scene.layers(scene.backend(FakeFlashInfer(), costs=FREE))
    torch.testing.assert_close(actual, scene.expected(), rtol=2 * torch.finfo(torch.bfloat16).eps, atol=2e-3)


def test_the_gain_is_what_is_not_read() -> None:
    scene = Scene([100, 90, 40], [(0, 3)], [([0, 1], 4)])
    attention = scene.backend(FakeFlashInfer(float32=True), costs=FREE)
    assert attention.cascade_gain(scene.batch()) == len(scene.specs) * 64 * attention._shape.bytes_per_key
    assert scene.backend(FakeFlashInfer(float32=True)).cascade_gain(scene.batch()) == 0
    scene.groups = []
    assert attention.cascade_gain(scene.batch()) == 0
