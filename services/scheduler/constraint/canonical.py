"""One form for sources that mean the same, and the key under which they are compiled once.

In a JSON schema the order of keywords and all white space are dropped. The order inside `properties` stays:
it is the order in which the answer's members are written. Leaves judging the source to its reader.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from services.scheduler.constraint.errors import BadSource
from services.scheduler.constraint.schema_words import COUNTS, LISTS, MAPS, SCHEMAS

Kind = Literal["regex", "json_schema", "ebnf", "lark", "choice", "structural_tag", "xml_schema"]

JSON_KINDS = frozenset({"json_schema", "choice", "structural_tag", "xml_schema"})
"""Kinds whose sources are JSON; the others are their own canonical form."""
ANY_JSON = "$$ANY$$"
_ANY_SCHEMA = {"type": ["object", "array"]}
_REMARKS = frozenset({"title", "description", "examples", "default", "$comment", "x-guidance", "deprecated"})


def canonical(kind: Kind, source: str) -> str:
    """The canonical form, valid Unicode. Raises BadSource where the source is no JSON but should be."""
    text = _canonical(kind, source)
    check_unicode(text)
    return text


def check_unicode(text: str) -> None:
    """Raises BadSource where the text cannot be written as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadSource("half of a character (a lone surrogate)", f"character {error.start + 1}") from None


def _canonical(kind: Kind, source: str) -> str:
    if kind == "json_schema":
        schema = _ANY_SCHEMA if source.strip() == ANY_JSON else read_json(source)
        return _compact(_ordered(schema))
    if kind in JSON_KINDS:
        return _compact(read_json(source))
    return source


def key(kind: Kind, text: str, *, best_effort: bool, any_whitespace: bool) -> bytes:
    """What must be equal for two constraints to share one compiled grammar."""
    head = f"{kind}\0{int(best_effort)}{int(any_whitespace)}\0"
    return hashlib.sha256(head.encode() + text.encode()).digest()


def read_json(source: str) -> Any:
    """Strict JSON: no NaN, no numbers beyond a double. Raises BadSource with the place."""
    try:
        return json.loads(source, parse_constant=_no_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise BadSource(f"not JSON: {error.msg}", f"line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise BadSource("nested too deeply") from None
    except ValueError as error:
        raise BadSource(f"not JSON: {error}") from None


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _compact(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except RecursionError:
        raise BadSource("nested too deeply") from None


def _ordered(schema: Any) -> Any:
    """The same schema with its keywords sorted and its remarks dropped; recursion is bounded by the JSON reader's."""
    try:
        return _ordered_schema(schema)
    except RecursionError:
        raise BadSource("nested too deeply") from None


def _ordered_schema(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    names = (name for name in sorted(schema) if name not in _REMARKS)
    return {name: _ordered_keyword(name, schema[name]) for name in names if not _says_nothing(name, schema[name])}


def _says_nothing(name: str, value: Any) -> bool:
    return name == "uniqueItems" and value is False


def _ordered_keyword(name: str, value: Any) -> Any:
    if name in COUNTS and isinstance(value, float) and value.is_integer():
        return int(value)  # 2.0 is a whole number in JSON Schema
    if name in MAPS and isinstance(value, dict):
        return {inner: _ordered_schema(schema) for inner, schema in value.items()}
    if isinstance(value, list) and (name in LISTS or name == "items"):
        return [_ordered_schema(item) for item in value]
    return _ordered_schema(value) if name in SCHEMAS else value  # names inside of others are names, not remarks
