"""Calls in Python's words as a GBNF grammar, from the schemas of the tools. Leaves compiling to the scheduler.

root ::= "[" call (", " call)* "]"        arguments in the order of the schema, optional ones may be left out
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from services.tokenizer.errors import invalid
from services.tokenizer.tools import schemas
from services.tokenizer.tools.definitions import Tool

_BASE = r"""
any ::= str | num | bool | none | list | dict
list ::= "[" (any (", " any)*)? "]"
dict ::= "{" (str ": " any (", " str ": " any)*)? "}"
str ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\nrt])* "\""
int ::= "-"? ("0" | [1-9] [0-9]*)
num ::= int ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
bool ::= "True" | "False"
none ::= "None"
"""
_NAMES = {"string": "str", "integer": "int", "number": "num", "boolean": "bool", "null": "none"}
_ENFORCED = frozenset(("type", "properties", "required", "items", "enum", "const", "anyOf", "additionalProperties"))
_ANNOTATIONS = frozenset(("title", "description", "default", "examples", "$schema"))
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DEEPEST = 16


def calls(tools: Sequence[Tool], many: bool) -> str:
    """The grammar. Raises ApiError where a strict tool asks for more than can be held here."""
    writer = _Writer()
    rules = [writer.call(tool) for tool in tools]
    more = ' (", " call)*' if many else ""
    lines = [f'root ::= "[" call{more} "]"', f"call ::= {' | '.join(rules)}", *writer.lines]
    return "\n".join(lines) + _BASE


class _Writer:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._strict = ""  # where the tool at hand is defined, if its schema must be held

    def call(self, tool: Tool) -> str:
        self._strict = f"{tool.param}.parameters" if tool.strict else ""
        schema = tool.parameters if tool.strict else schemas.relaxed(tool.parameters)
        self._check(schema)
        properties = schema.get("properties")
        for name in properties if isinstance(properties, dict) else ():
            if not _IDENTIFIER.fullmatch(name):
                at = f"{tool.param}.parameters.properties"
                raise invalid(f"{at}: {name[:64]!r} cannot be written in Python.", at, "invalid_value")
        body = self._members(schema, _keyword, 0)
        return self._rule(f"{_quoted(tool.name + '(')} {body} {_quoted(')')}")

    def _members(self, schema: dict[str, Any], key: Callable[[str], str], depth: int) -> str:
        """Properties in order; the rules take care of the commas between what is there."""
        properties = schema.get("properties")
        items = list(properties.items()) if isinstance(properties, dict) else []
        listed = schema.get("required")
        required = listed if isinstance(listed, list) else []
        first, later = '""', '""'
        for name, inner in reversed(items):
            value = f"{key(name)} {self._value(inner, depth + 1)}"
            if name in required:
                first, later = self._rule(f"{value} {later}"), self._rule(f'", " {value} {later}')
            else:
                first = self._rule(f"{value} {later} | {first}")
                later = self._rule(f'(", " {value})? {later}')
        return first

    def _value(self, schema: Any, depth: int) -> str:
        if not isinstance(schema, dict) or depth > _DEEPEST:
            return "any"
        self._check(schema)
        if "const" in schema or isinstance(schema.get("enum"), list):
            options = [schema["const"]] if "const" in schema else schema["enum"]
            return self._rule(" | ".join(_quoted(_written(option)) for option in options) or '""')
        if isinstance(schema.get("anyOf"), list):
            return self._rule(" | ".join(self._value(option, depth + 1) for option in schema["anyOf"]))
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return self._rule(" | ".join(self._typed({**schema, "type": kind}, depth) for kind in kinds))
        return self._typed(schema, depth)

    def _typed(self, schema: dict[str, Any], depth: int) -> str:
        kind = schema.get("type")
        if kind == "array":
            item = self._value(schema.get("items"), depth + 1)
            return self._rule(f'"[" ({item} (", " {item})*)? "]"')
        if kind == "object" or (kind is None and "properties" in schema):
            if not schema.get("properties"):
                return "dict"
            members = self._members(schema, _key, depth)
            return self._rule(f'"{{" {members} "}}"')
        return _NAMES.get(kind, "any") if isinstance(kind, str) else "any"

    def _check(self, schema: dict[str, Any]) -> None:
        if not self._strict:
            return
        for name in schema:
            if name not in _ENFORCED and name not in _ANNOTATIONS:
                text = f"{self._strict}: {name} cannot be enforced in calls written as Python."
                raise invalid(text, self._strict, "unsupported_parameter")

    def _rule(self, body: str) -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name} ::= {body}")
        return name


def _quoted(text: str) -> str:
    """A literal of the grammar."""
    return json.dumps(text, ensure_ascii=False)


def _keyword(name: str) -> str:
    return _quoted(f"{name}=")


def _key(name: str) -> str:
    return _quoted(f"{json.dumps(name, ensure_ascii=False)}: ")


def _written(value: Any) -> str:
    """A JSON value as a Python literal."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(_written, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_written(k)}: {_written(v)}" for k, v in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False)
