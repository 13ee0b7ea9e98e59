"""The schema of a tool's arguments as the grammar gets it. Leaves compiling it to the scheduler.

A strict tool is taken by its word. For others, clients send whatever their language describes: what no grammar can
enforce is left out, so that the call is still well-formed, and no arguments are made up where names are listed.
"""

from __future__ import annotations

import re
from typing import Any

from services.tokenizer.tools.definitions import Tool

_PLAIN = frozenset(
    (
        *("type", "const", "enum", "required", "minLength", "maxLength", "minItems", "maxItems"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"),
    )
)
_MAPS = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_COMBINED = ("anyOf", "allOf", "oneOf", "$ref", "patternProperties", "additionalProperties")
_FORMATS = frozenset(("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"))
_BEYOND_REGULAR = re.compile(r"\(\?(?!:)|\\[1-9bBAZzGk]")


def arguments(tool: Tool) -> dict[str, Any]:
    """The schema to enforce: every text it allows satisfies the tool's own, as far as a grammar can."""
    schema = tool.parameters if tool.strict else relaxed(tool.parameters)
    if tool.strict or any(name in schema for name in _COMBINED):
        return schema
    required, properties = schema.get("required", []), schema.get("properties", {})
    if not isinstance(required, list) or not all(isinstance(name, str) and name in properties for name in required):
        return schema
    return {"type": "object", **schema, "additionalProperties": False}


def relaxed(schema: Any) -> Any:
    """Without keywords that no grammar can hold. The nesting was bounded before."""
    if not isinstance(schema, dict):
        return schema
    kept = {name: value for name, value in schema.items() if name in _PLAIN}
    for name in _MAPS:
        if isinstance(schema.get(name), dict):
            kept[name] = {key: relaxed(value) for key, value in schema[name].items()}
    for name in _LISTS:
        if isinstance(schema.get(name), list):
            kept[name] = [relaxed(value) for value in schema[name]]
    for name in _SINGLE:
        if name in schema:
            kept[name] = relaxed(schema[name])
    if isinstance(schema.get("oneOf"), list) and "anyOf" not in kept:
        kept["anyOf"] = [relaxed(value) for value in schema["oneOf"]]
    _keep_texts(schema, kept)
    return kept


def _keep_texts(schema: dict[str, Any], kept: dict[str, Any]) -> None:
    reference, pattern, form = schema.get("$ref"), schema.get("pattern"), schema.get("format")
    if isinstance(reference, str) and reference.startswith("#"):
        kept["$ref"] = reference
    if isinstance(pattern, str) and not _BEYOND_REGULAR.search(pattern):
        kept["pattern"] = pattern
    if isinstance(form, str) and form in _FORMATS:
        kept["format"] = form
