"""Which fields of a body nobody here knows, at every depth that has a shape; leaves what is done about them to context.

What is free by its nature (messages, schemas, template arguments) is not looked into.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec.inspect import ListType, StructType, Type, UnionType, type_info

_OBJECT: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST: msgspec.json.Decoder[list[msgspec.Raw]] = msgspec.json.Decoder(list[msgspec.Raw])
_Shapes = dict[str, tuple[type[Any] | None, bool]]
_KNOWN: dict[type[Any], _Shapes] = {}  # one for each kind of body
MOST = 1000  # more are not counted


def unknown(given: Mapping[str, msgspec.Raw], kind: type[Any], known: Mapping[str, str]) -> list[str]:
    """Paths of the unknown fields of an object that was accepted as `kind`; `known` are names besides its own."""
    return sorted(name for name, _ in zip(_walk(given, kind, ""), range(MOST), strict=False) if name not in known)


def _walk(given: Mapping[str, msgspec.Raw], kind: type[Any], path: str) -> Iterator[str]:
    shapes = _shapes(kind)
    for name, value in given.items():
        if name not in shapes:
            yield path + name
            continue
        inner, is_list = shapes[name]
        if inner is None:
            continue
        data = bytes(value).lstrip()
        if data.startswith(b"{"):
            yield from _walk(_OBJECT.decode(data), inner, f"{path}{name}.")
        elif is_list and data.startswith(b"["):
            for index, item in enumerate(_LIST.decode(data)):
                if bytes(item).lstrip().startswith(b"{"):
                    yield from _walk(_OBJECT.decode(item), inner, f"{path}{name}[{index}].")


def _shapes(kind: type[Any]) -> _Shapes:
    """For every field: the one kind of object in it, and whether it may be a list of them."""
    known = _KNOWN.get(kind)
    if known is None:
        info = type_info(kind)
        assert isinstance(info, StructType)
        known = _KNOWN[kind] = {field.encode_name: _shape(field.type) for field in info.fields}
    return known


def _shape(info: Type) -> tuple[type[Any] | None, bool]:
    options = info.types if isinstance(info, UnionType) else (info,)
    for option in options:
        if isinstance(option, StructType):
            return option.cls, False
        if isinstance(option, ListType):
            inner, _ = _shape(option.item_type)
            if inner is not None:
                return inner, True
    return None, False
