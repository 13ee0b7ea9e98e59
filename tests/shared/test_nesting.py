"""Which nested groups are taken: against every possible choice where trees are small."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from shared.nesting import antichain, levels


@st.composite
def forests(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """(parents, rows, pages) of groups, the outer before the inner."""
    parents: list[int] = []
    rows: list[int] = []
    pages: list[int] = []
    free: list[int] = []  # rows of each group that none within it has
    for _ in range(draw(st.integers(1, 8))):
        around = draw(st.sampled_from([-1, *(g for g, left in enumerate(free) if left >= 2)]))
        size = draw(st.integers(2, 9 if around < 0 else free[around]))
        if around >= 0:
            free[around] -= size
        parents.append(around)
        rows.append(size)
        free.append(size)
        pages.append(draw(st.integers(1, 12)) + (pages[around] if around >= 0 else 0))
    return parents, rows, pages


def around_of(parents: list[int], group: int) -> list[int]:
    """All groups around it, the innermost first."""
    found = []
    while (group := parents[group]) >= 0:
        found.append(group)
    return found


def reads_spared(forest: tuple[list[int], list[int], list[int]], taken: set[int]) -> int:
    """Reads of pages that the groups taken spare: each reads its pages once for all its rows."""
    parents, rows, pages = forest
    spared = 0
    for group in taken:
        start = next((pages[above] for above in around_of(parents, group) if above in taken), 0)
        spared += (rows[group] - 1) * (pages[group] - start)
    return spared


def is_antichain(parents: list[int], groups: tuple[int, ...]) -> bool:
    return not any(above in groups for group in groups for above in around_of(parents, group))


def by_pages(rows: int, spared: int, pages: int) -> int:
    return spared * pages


@given(forests())
def test_no_other_antichain_saves_more(forest: tuple[list[int], list[int], list[int]]) -> None:
    parents, rows, pages = forest
    saved = [(count - 1) * page for count, page in zip(rows, pages, strict=True)]
    chosen = antichain(parents, saved)
    assert is_antichain(parents, tuple(chosen))
    every = [c for size in range(len(rows) + 1) for c in combinations(range(len(rows)), size)]
    best = max(sum(saved[g] for g in groups) for groups in every if is_antichain(parents, groups))
    assert sum(saved[g] for g in chosen) == best


def test_what_saves_nothing_is_not_chosen() -> None:
    assert antichain([-1, 0, -1], [0, -3, 5]) == [2]
    assert antichain([-1, 0, 0], [4, 2, 2]) == [0]  # one reading instead of two


@given(forests(), st.integers(1, 4), st.integers(1, 6))
def test_every_group_of_every_level_saves_something(
    forest: tuple[list[int], list[int], list[int]], most: int, least_pages: int
) -> None:
    parents, _, pages = forest
    before = 0
    for number, (flags, total) in enumerate(levels(*forest, by_pages, most=most, least_pages=least_pages), start=1):
        taken = {group for group, flag in enumerate(flags) if flag}
        assert total == reads_spared(forest, taken) > before
        before = total
        for group in taken:
            around = [above for above in around_of(parents, group) if above in taken]
            assert len(around) < number <= most
            assert pages[group] - (pages[around[0]] if around else 0) >= least_pages
            assert reads_spared(forest, taken - {group}) < total


@given(forests())
def test_with_levels_enough_all_groups_are_taken_that_differ_in_rows(
    forest: tuple[list[int], list[int], list[int]],
) -> None:
    parents, rows, _ = forest
    *_, (flags, _) = levels(*forest, by_pages, most=len(rows))
    same = {parents[group] for group in range(len(rows)) if parents[group] >= 0 and rows[parents[group]] == rows[group]}
    assert [not flag for flag in flags] == [group in same for group in range(len(rows))]


def test_nested_groups_are_added_to_the_best_antichain() -> None:
    found = list(levels([-1, 0, 0], [5, 2, 3], [10, 50, 30], by_pages, most=3, least_pages=8))
    assert found == [([False, True, True], 110), ([True, True, True], 120)]
    found = list(levels([-1, 0], [6, 2], [30, 31], by_pages, most=3, least_pages=8))
    assert found == [([True, False], 150)]  # one page more is not worth a level
