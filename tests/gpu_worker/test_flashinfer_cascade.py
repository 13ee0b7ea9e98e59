"""Shared prefixes read once: what is chosen, and that it changes no result."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.gpu_worker.attention.base import AttentionSpec
from services.gpu_worker.attention.cascade import MAX_LEVELS, Cascade, CascadeCosts, Chooser
from services.gpu_worker.attention.page_lists import Int32s
from services.gpu_worker.batch import HostColumns, SharedGroup
from tests.gpu_worker.flashinfer_fake import FakeFlashInfer
from tests.gpu_worker.flashinfer_scene import EXACT, FREE, Scene

PAGE = 16
LLAMA_8B = CascadeCosts(bytes_per_key=2 * 8 * 128 * 2, bytes_per_row=32 * (128 * 2 + 4))


def tables_of(lengths: list[int], groups: list[tuple[list[int], int]]) -> Int32s:
    """Pages 1000 * row, 1000 * row + 1, ..., but for those that are shared."""
    tables = 1000 * np.arange(len(lengths))[:, None] + np.arange(max(lengths) // PAGE + 1)
    for rows, pages in groups:
        tables[rows, :pages] = tables[rows[0], :pages]
    return tables.astype(np.int32)


def host(lengths: list[int], groups: list[tuple[list[int], int]]) -> tuple[HostColumns, list[SharedGroup]]:
    columns = HostColumns(
        np.arange(len(lengths) + 1, dtype=np.int32),
        np.array(lengths, dtype=np.int32),
        max(lengths) // PAGE + 1,
        tuple(np.array(rows, dtype=np.int32) for rows, _ in groups),
    )
    return columns, [SharedGroup(torch.tensor(rows, dtype=torch.int32), pages) for rows, pages in groups]


def chosen(
    lengths: list[int], groups: list[tuple[list[int], int]], costs: CascadeCosts = FREE, window: int = 0
) -> Cascade | None:
    return Chooser(PAGE, window).choose(*host(lengths, groups), len(lengths), costs)


def levels_of(cascade: Cascade, tables: Int32s) -> list[list[tuple[list[int], list[int]]]]:
    """Of each level its requests: the rows, and the pages they read."""
    found = []
    for level in cascade.levels:
        ids, ends = level.pages.pages(tables).tolist(), level.pages.indptr.tolist()
        rows = np.split(cascade.order, level.qo_indptr[1:])[:-1]
        pages = [ids[begin:end] for begin, end in pairwise(ends)]
        found.append([(part.tolist(), read) for part, read in zip(rows, pages, strict=True)])
    return found


def test_the_cut() -> None:
    lengths, shares = [100, 50, 90, 60], [([2, 0], 3), ([1, 3], 2)]
    columns, groups = host(lengths, shares)
    cascade = Chooser(PAGE, 0).choose(columns, groups, 4, FREE)
    assert cascade is not None
    assert levels_of(cascade, tables_of(lengths, shares)) == [[([0, 2], [2000, 2001, 2002]), ([1, 3], [1000, 1001])]]
    assert cascade.levels[0].pages.last_page_len.tolist() == [PAGE, PAGE]
    assert cascade.skip.tolist() == [3, 2, 3, 2]
    assert (cascade.saved_keys(PAGE), cascade.in_order) == (5 * PAGE, False)
    private = cascade.private(columns, PAGE)
    assert private.indptr.tolist() == [0, 4, 7, 9, 11]
    assert private.pages(tables_of(lengths, shares)).tolist() == [3, 4, 5, 6, 2003, 2004, 2005, 1002, 1003, 3002, 3003]


def test_the_cut_of_nested_groups() -> None:
    """Rows 0 to 5 share two pages; 4 and 5 two more; 1 and 2 one more; 7 and 8 share one."""
    lengths, shares = [100] * 9, [([5, 4, 3, 2, 1, 0], 2), ([7, 8], 1), ([5, 4], 4), ([1, 2], 3)]
    columns, groups = host(lengths, shares)
    cascade = Chooser(PAGE, 0).choose(columns, groups, 9, FREE)
    assert cascade is not None
    assert cascade.order.tolist() == [1, 2, 4, 5, 0, 3, 7, 8, 6]
    first, second = levels_of(cascade, tables_of(lengths, shares))
    assert first == [([1, 2, 4, 5, 0, 3], [5000, 5001]), ([7, 8], [7000])]
    assert second == [([1, 2], [1002]), ([4, 5], [5002, 5003])]
    assert cascade.skip.tolist() == [2, 3, 3, 2, 4, 4, 0, 1, 1]
    assert cascade.saved_keys(PAGE) == (5 * 2 + 1 * 1 + 1 * 2 + 1 * 1) * PAGE


def test_rows_between_the_groups_of_a_level_are_a_request_without_pages() -> None:
    outer = ([0, 1, 2], 1), ([3, 4, 5], 1)
    lengths, shares = [100] * 6, [*outer, ([0, 1], 2), ([3, 4], 2)]
    columns, groups = host(lengths, shares)
    cascade = Chooser(PAGE, 0).choose(columns, groups, 6, FREE)
    assert cascade is not None
    assert levels_of(cascade, tables_of(lengths, shares))[1] == [([0, 1], [1]), ([2], []), ([3, 4], [3001])]
    assert cascade.levels[1].pages.last_page_len.tolist() == [PAGE, 0, PAGE]
    assert cascade.in_order


def test_rows_in_order_need_no_gather() -> None:
    for groups, in_order in (([([0, 1], 3)], True), ([([1, 2], 3)], False), ([([1, 0], 3)], True)):
        cascade = chosen([100, 90, 80], groups)
        assert cascade is not None
        assert cascade.in_order == in_order
        assert sorted(cascade.order.tolist()) == [0, 1, 2]


def test_a_group_that_a_window_cuts_is_left_out() -> None:
    groups = [([0, 1], 2), ([2, 3], 2)]
    cascade = chosen([40, 50, 60, 90], groups, window=60)
    assert cascade is not None
    assert cascade.order[: cascade.levels[0].rows].tolist() == [0, 1]
    assert chosen([61, 61], [([0, 1], 2)], window=60) is None
    inner = chosen([40, 50, 60, 90], [([0, 1, 2, 3], 1), ([1, 2], 2)], window=60)
    assert inner is not None
    assert (inner.order[: inner.levels[0].rows].tolist(), len(inner.levels)) == ([1, 2], 1)


def test_what_was_chosen_holds_for_other_lengths_but_not_for_other_groups() -> None:
    chooser = Chooser(PAGE, 60)
    asked = host([40, 50, 60, 90], [([0, 1, 2], 1), ([1, 2], 2)])
    first = chooser.choose(*asked, 4, FREE)
    assert first is not None
    assert chooser.choose(*host([41, 51, 60, 91], [([0, 1, 2], 1), ([1, 2], 2)]), 4, FREE) is first
    for lengths, groups, costs in (
        ([41, 51, 60, 59], [([0, 1], 1), ([2, 3], 2)], FREE),
        ([41, 51, 60, 91], [([0, 1, 2], 1), ([0, 2], 2)], FREE),
        ([41, 51, 60, 91], [([0, 1, 2], 1), ([1, 2], 3)], FREE),
        ([41, 51, 60, 91, 9], [([0, 1, 2], 1), ([1, 2], 2)], FREE),
        ([41, 51, 61, 91], [([0, 1, 2], 1), ([1, 2], 2)], FREE),  # not within the window any more
        ([41, 51, 60, 91], [([0, 1, 2], 1), ([1, 2], 2)], LLAMA_8B),
    ):
        chooser.choose(*asked, 4, FREE)
        found = chooser.choose(*host(lengths, groups), len(lengths), costs)
        fresh = Chooser(PAGE, 60).choose(*host(lengths, groups), len(lengths), costs)
        assert repr(found) == repr(fresh) != repr(first)


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
    assert LLAMA_8B.group_gain(32, 31, 24 * PAGE) > launches > LLAMA_8B.group_gain(2, 1, 24 * PAGE) > 0
    assert chosen([1000] * 2, [([0, 1], 24)], LLAMA_8B) is None
    both = chosen([1000] * 34, [big, small], LLAMA_8B)
    assert both is not None
    assert both.levels[0].rows == 34
    tiny = chosen([1000] * 34, [big, ([32, 33], 1)], LLAMA_8B)
    assert tiny is not None
    assert tiny.levels[0].rows == 32


def test_rows_out_of_order_must_save_more() -> None:
    lengths = [17 * PAGE] * 40
    assert chosen(lengths, [(list(range(32)), 16)], LLAMA_8B) is not None
    assert chosen(lengths, [(list(range(8, 40)), 16)], LLAMA_8B) is None


def test_a_level_more_must_save_more_than_it_costs() -> None:
    """64 rows with a system prompt, half of them in one chat; 61 rows of a chat, and two of them go on together."""
    system = (list(range(64)), 24)
    for chat, number in ((8, 1), (24, 2)):  # pages of its own
        cascade = chosen([1000] * 64, [system, (list(range(32)), 24 + chat)], LLAMA_8B)
        assert cascade is not None
        assert len(cascade.levels) == number
    few = chosen([1000] * 64, [(list(range(61)), 24), ([60, 59], 48)], LLAMA_8B)
    assert few is not None
    assert [level.rows for level in few.levels] == [61]


def nested(draw: st.DrawFn, among: list[int], start: int, depth: int) -> list[tuple[list[int], int]]:
    """Groups among the rows, with more than `start` pages, and groups within these; the outer before the inner."""
    left = draw(st.permutations(among))
    groups: list[tuple[list[int], int]] = []
    while depth and len(left) >= 2 and draw(st.sampled_from([True, True, True, False])):
        count = draw(st.integers(2, len(left)))
        members, left = list(left[:count]), left[count:]
        pages = start + draw(st.integers(1, 3))
        groups += [(members, pages), *nested(draw, members, pages, depth - 1)]
    return groups


@st.composite
def trees(draw: st.DrawFn, most: int, depth: int = MAX_LEVELS) -> tuple[list[int], list[tuple[list[int], int]]]:
    """Lengths of the decode rows, and groups among them."""
    shared = [0] * draw(st.integers(3, most))
    groups = nested(draw, list(range(len(shared))), 0, depth)
    for rows, pages in groups:
        for row in rows:
            shared[row] = pages
    return [pages * PAGE + draw(st.integers(1, 40)) for pages in shared], groups


BETWEEN = (  # in the second level row 7 lies between the groups; the third has one group
    [60, 61, 50, 51, 80, 91, 92, 63, 70],
    [([3, 2, 1, 0], 1), ([7, 6, 5, 4], 2), ([1, 0], 3), ([4, 5, 6], 3), ([5, 6], 5)],
)


@example(tree=BETWEEN, window=0)
@given(tree=trees(12, depth=5), window=st.sampled_from([0, 0, 60]))
def test_every_row_reads_its_own_pages_in_order(
    tree: tuple[list[int], list[tuple[list[int], int]]], window: int
) -> None:
    decodes, groups = tree
    columns, shared = host(decodes, groups)
    tables = tables_of(decodes, groups)
    cascade = Chooser(PAGE, window).choose(columns, shared, len(decodes), FREE)
    if cascade is None:
        return
    assert len(cascade.levels) <= MAX_LEVELS
    reads: list[list[int]] = [[] for _ in decodes]
    for requests in levels_of(cascade, tables):
        for rows, pages in requests:
            for row in rows:
                reads[row] += pages
    assert [len(pages) for pages in reads] == cascade.skip.tolist()
    ids, ends = cascade.private(columns, PAGE).pages(tables), cascade.private(columns, PAGE).indptr
    for place, row in enumerate(cascade.order.tolist()):
        reads[row] += ids[ends[place] : ends[place + 1]].tolist()
    assert reads == [tables[row, : -(-length // PAGE)].tolist() for row, length in enumerate(decodes)]


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    decodes, groups = draw(trees(7))
    specs = (
        AttentionSpec(0.125, soft_cap=draw(st.sampled_from([0.0, 3.0]))),
        AttentionSpec(0.2, sliding_window=draw(st.sampled_from([30, 60, 200]))),
    )
    prefills = draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), max_size=1))
    kv_heads, heads = draw(st.sampled_from([(2, 2), (1, 6)]))
    return Scene(decodes, prefills, groups, kv_heads, heads, specs=specs, seed=draw(st.integers(0, 999)))


@settings(max_examples=25, deadline=None)
@example(scene=Scene(BETWEEN[0], [(5, 7)], BETWEEN[1]))
@given(scene=scenes())
def test_a_cascade_equals_plain_decode(scene: Scene) -> None:
    actual = scene.layers(scene.backend(FakeFlashInfer(float32=True), costs=FREE))
    torch.testing.assert_close(actual, scene.expected(), **EXACT)


def test_it_does_cascade() -> None:
    scene = Scene([100, 90, 40], [], [([1, 0], 4)])
    api = FakeFlashInfer(float32=True)
    scene.layers(scene.backend(api, costs=FREE))
    assert api.calls.count("merge_state_in_place") == len(scene.specs)
    nested_api = FakeFlashInfer(float32=True)
    nested = Scene([100, 90, 95], [], [([0, 2, 1], 2), ([1, 0], 4)])
    nested.layers(nested.backend(nested_api, costs=FREE))
    assert nested_api.calls.count("merge_state_in_place") == 2 * len(nested.specs)
    plain = FakeFlashInfer(float32=True)
    scene.layers(scene.backend(plain))  # by the real rule this saves far too little
    assert "merge_state_in_place" not in plain.calls


@settings(max_examples=25, deadline=None)
@example(tree=BETWEEN)
@given(tree=trees(7))
def test_every_shared_page_is_read_once(tree: tuple[list[int], list[tuple[list[int], int]]]) -> None:
    scene = Scene(tree[0], [], tree[1], specs=(AttentionSpec(0.125), AttentionSpec(0.125)))
    attention = scene.backend(FakeFlashInfer(float32=True), costs=FREE)
    scene.layers(attention)
    uses = Counter(page for table in scene.tables for page in table)
    again = sum(count - 1 for count in uses.values()) * PAGE
    assert attention.kv_bytes_read == len(scene.specs) * (sum(tree[0]) - again) * attention._shape.bytes_per_key


def test_layers_with_a_window_read_what_they_see() -> None:
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
    scene = Scene([100, 90, 70, 80], [], [([1, 0, 2], 2), ([0, 2], 4)], dtype=torch.bfloat16)
    actual = scene.layers(scene.backend(FakeFlashInfer(), costs=FREE))
    torch.testing.assert_close(actual, scene.expected(), rtol=2 * torch.finfo(torch.bfloat16).eps, atol=2e-3)


def test_the_gain_is_what_is_not_read() -> None:
    scene = Scene([100, 90, 40], [(0, 3)], [([0, 1], 4)])
    attention = scene.backend(FakeFlashInfer(float32=True), costs=FREE)
    assert attention.cascade_gain(scene.batch()) == len(scene.specs) * 64 * attention._shape.bytes_per_key
    assert scene.backend(FakeFlashInfer(float32=True)).cascade_gain(scene.batch()) == 0
    scene.groups = []
    assert attention.cascade_gain(scene.batch()) == 0
