"""Finds what is wrong in a JSON schema and where, before the engine sees it: wrong types, dead references, sizes.

Leaves the question whether a well-formed keyword can be enforced to the engine, whose answers it can place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from services.scheduler.constraint.errors import BadSource
from services.scheduler.constraint.limits import Limits
from services.scheduler.constraint.regex_source import check_classes, check_regex
from services.scheduler.constraint.schema_words import COUNTS, LISTS, MAPS, SCHEMAS

_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_NUMBERS = frozenset({"minimum", "maximum", "multipleOf"})
_EXCLUSIVE = frozenset({"exclusiveMinimum", "exclusiveMaximum"})
_STRINGS = frozenset({"pattern", "format", "$ref", "$id", "$schema", "$anchor", "$dynamicRef", "$dynamicAnchor"})
_EXACT = 1 << 53
"""Up to here a double counts in ones; the engine holds bounds as doubles."""
_LARGEST = 1 << 63
"""The engine counts no further: what lies beyond is forbidden anyway."""
_OF_OLD = frozenset({"extends", "disallow", "divisibleBy", "$recursiveRef"})
"""Keywords of old drafts that restrict: the engine would pass over them."""


def check_schema(schema: Any, limits: Limits, *, lenient: bool = False) -> None:
    """Raises BadSource with a JSON pointer. `lenient`: what the engine enforces only in part may pass."""
    if not isinstance(schema, dict | bool):
        raise BadSource("a schema is an object, true or false")
    if schema is False:
        raise BadSource("the schema false allows nothing")
    count = 0
    for place, inner, depth in walk(schema):
        count += 1
        if depth > limits.depth:
            raise BadSource(f"nested deeper than {limits.depth} schemas", place)
        if count > limits.schema_nodes:
            raise BadSource(f"more than {limits.schema_nodes} schemas", place)
        if isinstance(inner, bool):
            continue
        if not isinstance(inner, dict):
            raise BadSource("a schema is an object, true or false", place)
        for name, value in inner.items():
            _check_keyword(name, value, f"{place}/{_escape(name)}", limits)
        if not lenient:
            _check_bounds(inner, place)
            _check_members(inner, place)
        _check_optional(inner, place, limits)
        if "$ref" in inner:
            _check_reference(schema, inner["$ref"], f"{place}/$ref")


def walk(schema: Any) -> Iterator[tuple[str, Any, int]]:
    """Every schema inside `schema`, itself first: (JSON pointer, schema, depth)."""
    todo: list[tuple[str, Any, int]] = [("#", schema, 0)]
    while todo:
        place, inner, depth = todo.pop()
        yield place, inner, depth
        if isinstance(inner, dict):
            children = [(f"{place}/{path}", child, depth + 1) for path, child in _children(inner)]
            todo += reversed(children)


def place_of(schema: Any, error: str) -> str:
    """The pointer at the first thing that a message of the engine speaks of; empty where it names nothing."""
    keys = re.search(r'Unimplemented keys: \["([^"]+)"', error)
    known = re.search(r"Unknown format: (.*)", error)
    for place, inner, _ in walk(schema):
        if not isinstance(inner, dict):
            continue
        if keys and keys[1] in inner:
            return f"{place}/{keys[1]}"
        if known and inner.get("format") == known[1].strip():
            return f"{place}/format"
        if error.startswith("oneOf") and "oneOf" in inner:
            return f"{place}/oneOf"
        pattern = inner.get("pattern")
        if "regex" in error and isinstance(pattern, str) and pattern and pattern in error:
            return f"{place}/pattern"
    return ""


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in schema.items():
        if name in MAPS and isinstance(value, dict):
            yield from ((f"{name}/{_escape(inner)}", child) for inner, child in value.items())
        elif (name in LISTS or name == "items") and isinstance(value, list):
            yield from ((f"{name}/{index}", child) for index, child in enumerate(value))
        elif name in SCHEMAS:
            yield name, value


def _check_keyword(name: str, value: Any, place: str, limits: Limits) -> None:
    if name in _OF_OLD:
        raise BadSource(f"{name} belongs to another draft and is not enforced", place)
    if name in COUNTS and not (_is_number(value) and value == int(value) and value >= 0):
        raise BadSource("must be a whole number, 0 or more", place)
    if name in _NUMBERS and not _is_number(value):
        raise BadSource("must be a number", place)
    if name == "multipleOf" and value <= 0:
        raise BadSource("must be greater than 0", place)
    if name in _EXCLUSIVE and not (_is_number(value) or isinstance(value, bool)):
        raise BadSource("must be a number", place)
    if name in _STRINGS and not isinstance(value, str):
        raise BadSource("must be a string", place)
    if name in MAPS and not isinstance(value, dict):
        raise BadSource("must be an object of schemas", place)
    if name in LISTS and not (isinstance(value, list) and value):
        raise BadSource("must be a list of schemas, not empty", place)
    if name == "type":
        _check_type(value, place)
    elif name == "enum":
        _check_enum(value, place, limits)
    elif name == "required" and not _is_names(value) and not isinstance(value, bool):
        raise BadSource("must be a list of names", place)
    elif name == "pattern":
        _check_pattern(value, place, limits)
    elif name == "patternProperties":
        for pattern in value:
            _check_pattern(pattern, f"{place}/{_escape(pattern)}", limits)


def _check_type(value: Any, place: str) -> None:
    names = value if isinstance(value, list) else [value]
    if not names:
        raise BadSource("must name a type", place)
    for name in names:
        if not isinstance(name, str) or name not in _TYPES:
            raise BadSource(f"{name!r} is no type; the types are {', '.join(sorted(_TYPES))}", place)


def _check_enum(value: Any, place: str, limits: Limits) -> None:
    if not isinstance(value, list) or not value:
        raise BadSource("must be a list, not empty", place)
    if len(value) > limits.alternatives:
        raise BadSource(f"more than {limits.alternatives} values", place)


def _check_pattern(pattern: str, place: str, limits: Limits) -> None:
    try:
        check_regex(pattern, limits, may_be_empty=True)
        check_classes(pattern)
    except BadSource as error:
        raise BadSource(error.reason, f"{place} ({error.place})" if error.place else place) from None


def _check_bounds(schema: dict[str, Any], place: str) -> None:
    """Rounded to a double a bound must not let in what it keeps out."""
    for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        bound = schema.get(name)
        if not isinstance(bound, int) or isinstance(bound, bool) or not _EXACT <= abs(bound) < _LARGEST:
            continue
        rounded = int(float(bound))
        looser = rounded < bound if "inimum" in name else rounded > bound
        if looser or name in _EXCLUSIVE or schema.get(f"exclusive{name.capitalize()}") is True:
            raise BadSource(
                "beyond 2**53 a bound is enforced only where it is inclusive and a double", f"{place}/{name}"
            )


def _check_members(schema: dict[str, Any], place: str) -> None:
    """A name that is not required may be written twice, and counts once for who reads it."""
    least, required = schema.get("minProperties", 0), schema.get("required", ())
    named = len(set(required)) if isinstance(required, list) else 0
    if least > named + 1:
        reason = (
            f"with {named} required names no more than {named + 1} can be enforced (best_effort checks it afterwards)"
        )
        raise BadSource(reason, f"{place}/minProperties")


def _check_optional(schema: dict[str, Any], place: str, limits: Limits) -> None:
    properties = schema.get("properties", {})
    required = schema.get("required", ())
    optional = len(properties.keys() - set(required)) if isinstance(required, list) else len(properties)
    if optional > limits.optional_properties:
        raise BadSource(f"more than {limits.optional_properties} optional properties", f"{place}/properties")


def _check_reference(root: Any, reference: str, place: str) -> None:
    if not reference.startswith("#"):
        if isinstance(root, dict) and any(isinstance(s, dict) and "$id" in s for _, s, _ in walk(root)):
            return  # may name a schema inside this one; the engine knows, and fetches nothing
        raise BadSource(f"{reference!r} lies outside the schema, and nothing is fetched", place)
    if not reference.startswith("#/"):
        return
    target = root
    for part in reference[2:].split("/"):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdigit() and int(name) < len(target):
            target = target[int(name)]
        elif isinstance(target, dict) and name in target:
            target = target[name]
        else:
            raise BadSource(f"{reference!r} points at nothing", place)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
