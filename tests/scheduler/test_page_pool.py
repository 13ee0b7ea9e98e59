"""PagePool: all or nothing, each page once."""

import pytest

from services.scheduler.page_pool import PagePool


def test_all_pages_are_free_at_first_and_come_in_ascending_order() -> None:
    pool = PagePool(5)
    assert pool.free == 5
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) == [3, 4]
    assert pool.free == 0


def test_allocation_is_all_or_nothing() -> None:
    pool = PagePool(3)
    assert pool.allocate(4) is None
    assert pool.free == 3
    assert pool.allocate(0) == []
    assert pool.allocate(3) is not None
    assert pool.allocate(1) is None


def test_released_pages_are_used_again() -> None:
    pool = PagePool(4)
    pool.allocate(4)
    pool.release([2, 1])
    assert pool.free == 2
    assert pool.is_free(1)
    assert not pool.is_free(0)
    assert sorted(pool.allocate(2) or []) == [1, 2]
    pool.check()


@pytest.mark.parametrize("pages", [[0], [3, 3], [2, 9], [-1], [2, 3, 0]])
def test_a_wrong_release_raises_and_changes_nothing(pages: list[int]) -> None:
    pool = PagePool(5)
    pool.allocate(5)
    pool.release([0])
    with pytest.raises(ValueError, match="pages"):
        pool.release(pages)
    assert pool.free == 1
    assert not pool.is_free(2)
    pool.check()


def test_unknown_pages_are_not_free() -> None:
    pool = PagePool(2)
    assert not pool.is_free(2)
    assert not pool.is_free(-1)


def test_negative_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="num_pages"):
        PagePool(-1)
    with pytest.raises(ValueError, match="allocate"):
        PagePool(2).allocate(-1)
