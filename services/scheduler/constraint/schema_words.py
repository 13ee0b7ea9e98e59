"""Keywords of JSON Schema by what stands behind them. Leaves what each one asks for to those who read schemas."""

from __future__ import annotations

COUNTS = frozenset(
    {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"}
)
"""Whole numbers, not negative."""
MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Schemas by name."""
LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
"""Lists of schemas; `items` may be one, too."""
SCHEMAS = frozenset(
    {
        "additionalProperties",
        "unevaluatedProperties",
        "unevaluatedItems",
        "additionalItems",
        "propertyNames",
        "contains",
        "items",
        "not",
        "if",
        "then",
        "else",
    }
)
"""One schema each."""
