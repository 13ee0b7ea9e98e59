"""Which escapes an answer may use in JSON strings. Leaves enforcing them to the engine.

The engine tells names apart by their spelling, so `"\\u0061"` would pass for a name that is not `"a"`, and its value
for one that no keyword rules. Without \\u every character has one spelling; only a schema that itself holds other
control characters needs it.
"""

from __future__ import annotations

from typing import Any

from services.scheduler.constraint.errors import BadSource
from services.scheduler.constraint.schema_check import walk

_SHORT = 'nrbtf"\\'
_WITHOUT_SHORT = frozenset(map(chr, range(0x20))) - frozenset("\n\r\t\b\f")


def allowed_escapes(schema: Any, *, lenient: bool = False) -> str:
    """The letters that may follow a backslash. Raises BadSource where they would let names be spelled anew."""
    if not _holds_control_characters(schema):
        return _SHORT
    for place, inner, _ in walk(schema):
        if isinstance(inner, dict) and not lenient and _has_open_names(inner):
            raise BadSource("control characters need additionalProperties: false beside named properties", place)
    return _SHORT + "u"


def _has_open_names(schema: dict[str, Any]) -> bool:
    named = "properties" in schema or "patternProperties" in schema
    return named and ("patternProperties" in schema or schema.get("additionalProperties") is not False)


def _holds_control_characters(schema: Any) -> bool:
    todo = [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, str) and not _WITHOUT_SHORT.isdisjoint(value):
            return True
        if isinstance(value, dict):
            todo += [*value, *value.values()]
        elif isinstance(value, list):
            todo += value
    return False
