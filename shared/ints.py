"""int32 columns <-> bytes, the form in which ids ride in messages; nothing else."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable

ITEM_BYTES = 4
_SWAP = sys.byteorder == "big"


def pack(values: Iterable[int]) -> bytes:
    """int32 little endian bytes of `values`. Raises OverflowError outside int32."""
    column = values if type(values) is array and values.typecode == "i" else array("i", values)
    if _SWAP:
        column = array("i", column)
        column.byteswap()
    return column.tobytes()


def unpack(data: bytes | bytearray | memoryview) -> array[int]:
    """The values behind `pack`. Raises ValueError where the length is no multiple of four."""
    column = array("i")
    column.frombytes(data)
    if _SWAP:
        column.byteswap()
    return column


def count(data: bytes) -> int:
    """How many values `data` holds."""
    return len(data) // ITEM_BYTES
