"""Forty constraints that nobody means well: each must be refused with a 400 or obeyed within the limits.

`HOSTILE` holds (name, sampling parameters of /generate). Leaves sending them to whoever measures or tests.
"""

from __future__ import annotations

import json
from typing import Any


def _nested(depth: int) -> str:
    return '{"type":"object","required":["a"],"properties":{"a":' * depth + '{"type":"null"}' + "}}" * depth


def _many(count: int, **more: Any) -> str:
    return json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}, **more})


def _doubling(levels: int) -> str:
    parts: dict[str, Any] = {
        f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "minItems": 2, "items": False}
        for i in range(levels)
    }
    parts[f"d{levels}"] = {"type": "null"}
    return json.dumps({"$defs": parts, "$ref": "#/$defs/d0"})


_LOOP = '{"$ref":"#/$defs/a","$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}}}'
_RULES = "start: " + " | ".join(f'a "{i}"' for i in range(15_000)) + '\na: "x"'
_POWERS = "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(40)) + '\nr40 ::= "a"\nroot ::= r0'

HOSTILE: list[tuple[str, dict[str, Any]]] = [
    ("nested repeat", {"regex": "(a+)+b"}),
    ("overlapping branches", {"regex": "(a|aa)+$"}),
    ("twenty wildcards", {"regex": "(.*a){20}"}),
    ("exponential states", {"regex": "[ab]*a[ab]{30}"}),
    ("exponential states three times", {"regex": "(.*a.{20}|.*b.{21}|.*c.{22})x"}),
    ("repeat of a repeat", {"regex": "(x{1,100}){1,100}"}),
    ("repeat of a repeat of a repeat", {"regex": "((x{1,50}){1,50}){1,50}"}),
    ("a thousand million", {"regex": "a{1,1000000000}"}),
    ("a count beyond 64 bits", {"regex": "a{999999999999999999999}"}),
    ("5,000 groups", {"regex": "(" * 5000 + ")" * 5000}),
    ("30,000 branches", {"regex": "|".join(f"w{i}" for i in range(30_000))}),
    ("a literal of 1 MB", {"regex": "x" * 1_000_000}),
    ("control characters", {"regex": "\0\1\2[^\0]"}),
    ("look-around", {"regex": "(?=(a+))a*b"}),
    ("backreference", {"regex": r"(a*)*\1b"}),
    ("a schema of 1 MB", {"json_schema": json.dumps({"description": "x", "default": "y" * 1_000_000})}),
    ("8,000 optional properties", {"json_schema": _many(8000)}),
    ("6,000 required properties", {"json_schema": _many(6000, required=[f"p{i}" for i in range(6000)])}),
    ("60 objects deep", {"json_schema": _nested(60)}),
    ("200 objects deep", {"json_schema": _nested(200)}),
    ("50,000 arrays deep", {"json_schema": "[" * 50_000 + "]" * 50_000}),
    ("50,000 objects deep", {"json_schema": '{"a":' * 50_000 + "1" + "}" * 50_000}),
    ("a reference to itself", {"json_schema": '{"$ref":"#"}'}),
    ("a loop of references", {"json_schema": _LOOP}),
    ("doubling references", {"json_schema": _doubling(30)}),
    ("a remote reference", {"json_schema": '{"$ref":"http://example.com/schema"}'}),
    ("products of choices", {"json_schema": json.dumps({"allOf": [{"anyOf": [{"minimum": i}, {"maximum": -i}]}
                                                                 for i in range(20)]})}),
    ("15,000 values", {"json_schema": json.dumps({"enum": [f"value {i}" for i in range(15_000)]})}),
    ("a string of at least 1,000,000", {"json_schema": '{"type":"string","minLength":1000000}'}),
    ("an array of at least 1,000,000", {"json_schema": '{"type":"array","minItems":1000000}'}),
    ("a pattern of repeats in a schema", {"json_schema": '{"type":"string","pattern":"((a{1,99}){1,99}){1,99}"}'}),
    ("an unknown type", {"json_schema": '{"type":"stuff"}'}),
    ("a wrong type", {"json_schema": 5}),
    ("a wrong type of a pattern", {"regex": ["a"]}),
    ("two constraints at once", {"regex": "a+", "json_schema": "{}"}),
    ("a rule that is itself", {"ebnf": "root ::= root"}),
    ("2 to the power of 40", {"ebnf": _POWERS}),
    ("15,000 rules", {"lark": _RULES}),
    ("an ambiguous grammar", {"lark": 'start: a\na: a a | a a a | b\nb: a | "x"\n'}),
    ("long choices", {"choice": ["x" * 1000] * 200}),
]  # fmt: skip
