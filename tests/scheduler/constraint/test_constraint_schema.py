"""JSON schemas: every keyword the engine enforces, judged by the jsonschema library; what it cannot is refused."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from services.scheduler.constraint.canonical import canonical, key
from services.scheduler.constraint.errors import BadSource

sys.path.insert(0, str(Path(__file__).parent))
from constraint_kit import accepts, build, check_accepted, check_refused, check_sampled

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TREE = {
    "$defs": {"n": {"type": "object", "properties": {"v": {"type": "integer"}, "next": {"$ref": "#/$defs/n"}},
                    "required": ["v"], "additionalProperties": False}},
    "$ref": "#/$defs/n",
}  # fmt: skip

# schema, texts accepted, texts refused (good¦bad)
TABLE: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "string"}, ['""', '"中文😀"', '"a\\"b\\\\\\n"'], ['"', "¦1", '"a"¦b', '"¦\n']),
    ({"type": "integer"}, ["0", "-12", "123"], ["-", "0¦1", "1¦.", '¦"']),
    ({"type": "number"}, ["0", "-1.5", "2e10"], ["1.", "¦a"]),
    ({"type": "boolean"}, ["true", "false"], ["¦n", "tru¦n"]),
    ({"type": "null"}, ["null"], ["¦t"]),
    ({"type": "array"}, ["[]", '[1,"a",null]'], ["[", "[1¦ ", "[1,¦]"]),
    ({"type": "object"}, ["{}", '{"中":[1]}'], ["{", '{"a"¦,']),
    ({"type": ["integer", "null"]}, ["1", "null"], ['¦"']),
    (True, ["1", '{"a":1}'], ["¦x"]),
    ({}, ["1", "[]"], ["¦x"]),
    (A, ['{"a":1}'], ["{¦}", '{"a":1¦,', '{"¦b', '{"a":¦"', '{¦ ']),
    ({"properties": {"a": {"type": "integer"}}, "type": "object"}, ["{}", '{"a":1}', '{"b":"x"}'], ['{"a":¦"']),
    ({**A, "additionalProperties": {"type": "boolean"}}, ['{"a":1}', '{"a":1,"b":true}'], ['{"a":1,"b":¦1']),
    ({"type": "object", "patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False},
     ["{}", '{"x_a":1}'], ['{"¦y', '{"x_a":¦"']),
    ({"type": "object", "properties": {"a": {"const": 1}}}, ['{"b":"x"}', '{"\\n":2}'], ['{"\\¦u0061":2}', '{"a":¦2']),
    ({"type": "object", "patternProperties": {"^x": {"const": 1}}}, ['{"x":1}', '{"y":2}'], ['{"\\¦u0078":2}']),
    ({"const": {"a": "\x01"}}, ['{"a":"\\u0001"}'], ['{"¦\\u0061"']),
    ({"type": "integer", "minimum": 0, "maximum": 2**64 - 1}, ["0", str(2**63 - 1)], ["¦-"]),
    ({"type": "array", "uniqueItems": False, "maxItems": 2}, ["[]", "[1,1]"], ["[1,1¦,"]),
    ({"type": "object", "minProperties": 1, "maxProperties": 2}, ['{"a":1}', '{"a":1,"b":2}'],
     ["{¦}", '{"a":1,"b":2¦,']),
    ({"enum": ["red", "中", 3, None, {"k": [1]}]}, ['"red"', '"中"', "3", "null", '{"k":[1]}'], ['"r¦o', "¦4", '"re']),
    ({"const": "x y"}, ['"x y"'], ['"x¦y']),
    ({"const": {"b": 1, "a": 2}}, ['{"b":1,"a":2}'], ['{"¦a']),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"中文字"', '"😀😀"'], ['"a¦"', '"abc¦d']),
    ({"type": "string", "pattern": "^[A-Z]{2}\\d+$"}, ['"AB12"'], ['"AB¦"', '"¦a', '"AB1¦x']),
    ({"type": "string", "format": "date"}, ['"2024-12-31"'], ['"2024¦/', '"2024-¦3']),
    ({"type": "string", "format": "date-time"}, ['"2024-12-31T10:20:30Z"'], ['"2024-12-31¦"']),
    ({"type": "string", "format": "time"}, ['"10:20:30Z"'], ['"¦9a'[:3], '"10:¦7']),
    ({"type": "string", "format": "uuid"}, ['"123e4567-e89b-12d3-a456-426614174000"'], ['"12¦g', '"1¦"']),
    ({"type": "string", "format": "ipv4"}, ['"1.2.3.4"'], ['"1.2.3¦"', '"25¦6']),
    ({"type": "string", "format": "ipv6"}, ['"::1"'], ['"¦g']),
    ({"type": "string", "format": "email"}, ['"a@b.example"'], ['"a¦"', '"¦@']),
    ({"type": "string", "format": "hostname"}, ['"a.example"'], ['"¦-']),
    ({"type": "string", "format": "uri"}, ['"http://a/b?c"'], ['"¦"']),
    ({"type": "string", "format": "duration"}, ['"P1DT2H"'], ['"¦1', '"P¦"']),
    ({"type": "integer", "minimum": 18, "maximum": 120}, ["18", "99", "120"], ["1", "12¦1", "¦0"]),
    ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10}, ["1", "9"], ["¦0", "1¦0", "¦-"]),
    ({"type": "number", "minimum": 0, "maximum": 1}, ["0", "0.5", "1"], ["¦2", "1¦1"]),
    ({"type": "integer", "multipleOf": 5}, ["0", "15"], ["1", "12"]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, ["[1]", "[1,2]"],
     ["[¦]", "[1,2¦,", '[¦"']),
    ({"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
     ['[1,"a"]'], ["[1¦]", '[¦"', '[1,"a"¦,']),
    ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]}, ["12", '"a"'], ['"a¦b', "¦["]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["12", '"a"'], ["¦["]),
    ({"allOf": [{"type": "integer"}, {"minimum": 5}], "maximum": 7}, ["5", "7"], ["¦8", "¦4"]),
    (TREE, ['{"v":1}', '{"v":1,"next":{"v":2}}'], ['{"v":1,"next":{¦}', '{"v":1,"next":¦1']),
    ({"definitions": {"a b": {"type": "null"}}, "$ref": "#/definitions/a%20b"}, ["null"], ["¦1"]),
    ({"type": "object", "properties": {"é": {"const": "😀"}}, "required": ["é"], "additionalProperties": False},
     ['{"é":"😀"}'], ['{"¦e', '{"é":"¦a']),
    ({"type": "object", "properties": {"b": {"type": "null"}, "a": {"type": "null"}}, "required": ["b", "a"],
      "additionalProperties": False}, ['{"b":null,"a":null}'], ['{"¦a']),
]  # fmt: skip

REFUSED: list[tuple[str, str, str]] = [
    ("[]", "", "a schema is an object"),
    ("5", "", "a schema is an object"),
    ("false", "", "allows nothing"),
    ("{", "line 1, column 2", "not JSON"),
    ('{"minimum":NaN}', "", "NaN"),
    ('{"maximum":1e999}', "", "too large"),
    ('{"type":"stuff"}', "#/type", "no type"),
    ('{"type":5}', "#/type", "no type"),
    ('{"type":[]}', "#/type", "must name a type"),
    ('{"properties":[]}', "#/properties", "object of schemas"),
    ('{"properties":{"a":3}}', "#/properties/a", "a schema is"),
    ('{"items":5}', "#/items", "a schema is"),
    ('{"required":"a"}', "#/required", "list of names"),
    ('{"minLength":-1}', "#/minLength", "whole number"),
    ('{"minLength":1.5}', "#/minLength", "whole number"),
    ('{"type":"integer","minimum":"x"}', "#/minimum", "number"),
    ('{"multipleOf":0}', "#/multipleOf", "greater than 0"),
    ('{"enum":[]}', "#/enum", "not empty"),
    ('{"anyOf":[]}', "#/anyOf", "not empty"),
    ('{"$ref":"#/nope"}', r"#/\$ref", "points at nothing"),
    ('{"$ref":"http://example.com/x"}', r"#/\$ref", "nothing is fetched"),
    ('{"type":"string","pattern":"["}', r"#/pattern \(column 1\)", "unclosed"),
    ('{"pattern":"^+[a-z]$"}', r"#/pattern \(column 2\)", "anchor"),
    ('{"pattern":"(?<=x)*"}', r"#/pattern \(column 1\)", "look-around"),
    ('{"properties":{"a":{"items":{"uniqueItems":true}}}}', "#/properties/a/items/uniqueItems", "cannot be enforced"),
    ('{"not":{"type":"string"}}', "#/not", "cannot be enforced"),
    ('{"contains":{}}', "#/contains", "cannot be enforced"),
    ('{"if":{},"then":{"type":"null"}}', "#/", "cannot be enforced"),
    ('{"propertyNames":{"maxLength":2}}', "#/propertyNames", "cannot be enforced"),
    ('{"dependentRequired":{"a":["b"]}}', "#/dependentRequired", "cannot be enforced"),
    ('{"unevaluatedProperties":false}', "#/unevaluatedProperties", "cannot be enforced"),
    ('{"oneOf":[{"type":"integer"},{"minimum":3}]}', "#/oneOf", "cannot be enforced"),
    ('{"type":"string","format":"zzz"}', "#/format", "Unknown format"),
    ('{"type":"integer","minimum":5,"maximum":3}', "", "Unsatisfiable"),
    ('{"type":"integer","minimum":9007199254740993}', "#/minimum", "beyond"),
    ('{"type":"integer","exclusiveMinimum":9007199254740992}', "#/exclusiveMinimum", "beyond"),
    ('{"minimum":9007199254740994,"exclusiveMinimum":true}', "#/minimum", "beyond"),
    ('{"type":"integer","maximum":9007199254740995}', "#/maximum", "beyond"),
    ('{"type":"object","minProperties":3,"required":["a"]}', "#/minProperties", "no more than 2"),
    ('{"properties":{"a\\u0001":{}}}', "#", "control characters"),
    ('{"pattern":"^[^a&&b]$"}', r"#/pattern \(column 6\)", "must be written"),
    ('{"pattern":"^[[:alpha:]]$"}', r"#/pattern \(column 3\)", "must be written"),
    ('{"divisibleBy":3}', "#/divisibleBy", "another draft"),
    ('{"extends":{"type":"null"}}', "#/extends", "another draft"),
    ('{"x-guidance":{"lenient":true},"not":{}}', "#/not", "cannot be enforced"),
    ("[" * 100_000, "", "nested too deeply"),
    (json.dumps({"properties": {f"p{i}": {} for i in range(501)}}), "#/properties", "optional properties"),
]


FINE_POINTS = FormatChecker(set(FormatChecker.checkers) - {"date", "date-time", "time"})
"""Leap days and leap seconds are beyond a grammar."""


def _judge(schema: Any) -> Any:
    validator = Draft202012Validator(schema, format_checker=FINE_POINTS)

    def judge(text: str) -> bool:
        return validator.is_valid(json.loads(text))

    return judge


@pytest.mark.parametrize(("schema", "accepted", "refused"), TABLE, ids=[json.dumps(row[0])[:40] for row in TABLE])
def test_schema_table(schema: Any, accepted: list[str], refused: list[str]) -> None:
    matcher = build("json_schema", json.dumps(schema))
    judge = _judge(schema)
    for text in accepted:
        assert judge(text)
        check_accepted(matcher, text)
    for text in refused:
        check_refused(matcher, text)
    check_sampled(matcher, judge)


@pytest.mark.parametrize(("source", "place", "reason"), REFUSED, ids=[row[0][:40] for row in REFUSED])
def test_schema_that_cannot_be_enforced_is_refused(source: str, place: str, reason: str) -> None:
    with pytest.raises(BadSource) as caught:
        build("json_schema", source)
    assert re.search(reason, caught.value.reason)
    assert re.match(place, caught.value.place)


def test_a_pattern_in_the_middle_of_a_string() -> None:
    matcher = build("json_schema", '{"type":"string","pattern":"中"}')
    for text in ('"a中b"', '"中"', '"😀中"'):
        check_accepted(matcher, text)
    for text in ('"ab¦"', '"中', "¦中"):
        check_refused(matcher, text)


def test_any_json_is_an_object_or_an_array() -> None:
    matcher = build("json_schema", "$$ANY$$")
    for text in ("{}", "[]", '{"a":[1,{"b":null}]}'):
        check_accepted(matcher, text)
    check_refused(matcher, "¦1")
    check_sampled(matcher, lambda text: isinstance(json.loads(text), dict | list))


def test_separators_are_compact_and_white_space_is_bounded_where_it_is_allowed() -> None:
    source = json.dumps(A | {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}})
    compact = build("json_schema", source)
    assert accepts(compact, '{"a":1,"b":2}')
    check_refused(compact, '{"a":1,¦ ')
    spaced = build("json_schema", source, any_whitespace=True)
    for text in ('{"a":1,"b":2}', '{"a": 1, "b": 2}', '{\n  "a": 1,\n  "b": 2\n}'):
        assert accepts(spaced, text)
    check_refused(spaced, "{" + " " * 20 + "¦ ")
    check_refused(spaced, "{\n¦\n")
    check_sampled(spaced, _judge(json.loads(source)))


def test_best_effort_takes_what_is_refused_otherwise() -> None:
    schema = json.dumps({"type": "array", "items": {"type": "integer"}, "uniqueItems": True})
    with pytest.raises(BadSource):
        build("json_schema", schema)
    matcher = build("json_schema", schema, best_effort=True)
    assert accepts(matcher, "[1,1]")
    check_refused(matcher, '[¦"')


def test_canonical_form_forgets_layout_and_keyword_order_but_not_the_order_of_properties() -> None:
    def name(source: str) -> bytes:
        return key("json_schema", canonical("json_schema", source), best_effort=False, any_whitespace=False)

    one = name('{"type":"object","properties":{"a":{"type":"string","maxLength":2}},"title":"x"}')
    assert one == name('{ "properties": {"a": {"maxLength": 2.0, "type": "string"}},\n "type": "object"}')
    ordered = '{"properties":{"a":{},"b":{}}}', '{"properties":{"b":{},"a":{}}}'
    assert name(ordered[0]) != name(ordered[1])
    assert name('{"dependentRequired":{"title":["a"]}}') != name('{"dependentRequired":{}}')
    assert canonical("json_schema", '{"x":{"title":{"const":8}}}') == '{"x":{"title":{"const":8}}}'
    assert name('{"const":{"a":1,"b":2}}') != name('{"const":{"b":2,"a":1}}')
    plain = canonical("regex", "a")
    assert key("regex", plain, best_effort=False, any_whitespace=False) != key(
        "choice", plain, best_effort=False, any_whitespace=False
    )
