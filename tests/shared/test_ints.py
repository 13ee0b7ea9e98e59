"""int32 columns survive the trip and refuse what does not fit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import ints


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_round_trip(values: list[int]) -> None:
    data = ints.pack(values)
    assert ints.unpack(data).tolist() == values
    assert ints.count(data) == len(values)


def test_little_endian() -> None:
    assert ints.pack([1]) == b"\x01\x00\x00\x00"


def test_out_of_range_is_an_error() -> None:
    with pytest.raises(OverflowError):
        ints.pack([2**31])


def test_a_torn_column_is_an_error() -> None:
    with pytest.raises(ValueError):
        ints.unpack(b"\x01\x00\x00")
