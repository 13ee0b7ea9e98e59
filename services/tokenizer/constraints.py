"""Which constraint a request asks for, whatever its words. Leaves judging the source to the compiler.

regex, json_schema, ebnf, lark, choice, structural_tag, xml_schema      one of them, beside the sampling parameters
response_format, structured_outputs, guided_...                         the OpenAI endpoints' words for the same
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from services.tokenizer.errors import invalid
from services.tokenizer.sampling import Names
from services.tokenizer.schema import ConstraintFields, OpenAIFields
from shared.messages.request import Constraint

KINDS = ("regex", "json_schema", "ebnf", "lark", "choice", "structural_tag", "xml_schema")
SWITCHES = ("best_effort", "complete_within_budget", "jump_forward", "any_whitespace")
JSON_KINDS = ("json_schema", "structural_tag")
ANY_OBJECT = '{"type":"object"}'
_FORMAT_FIELDS = {
    "json_object": {"type"},
    "json_schema": {"type", "json_schema"},
}
_SCHEMA_FIELDS = {"name", "description", "schema", "strict"}
_STRUCTURED = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
    "lark": "lark",
    "xml_schema": "xml_schema",
}
_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
}


class _Found(NamedTuple):
    field: str  # as the client calls it
    kind: Any
    source: str


def read(fields: ConstraintFields, names: Names) -> Constraint | None:
    """The one constraint of a request. Raises ApiError where there are two, or where a switch has nothing to switch."""
    found = [_field(names(kind), kind, getattr(fields, kind)) for kind in KINDS if getattr(fields, kind) is not None]
    if isinstance(fields, OpenAIFields):
        found += _response_format(fields.response_format or {})
        found += _structured_outputs(fields.structured_outputs or {})
        found += [
            _field(name, kind, getattr(fields, name))
            for name, kind in _GUIDED.items()
            if getattr(fields, name) is not None
        ]
    if len(found) > 1:
        text = " and ".join(item.field for item in found[:2])
        raise invalid(f"{text} cannot be used together: a request has one constraint.", found[1].field, "invalid_value")
    if not found:
        for switch in SWITCHES:
            if getattr(fields, switch):
                raise invalid(f"{names(switch)} needs a constraint.", names(switch), "invalid_value")
        return None
    return _constraint(found[0], fields, names)


def _constraint(found: _Found, fields: ConstraintFields, names: Names) -> Constraint:
    if fields.best_effort and (getattr(fields, "stop", None) or getattr(fields, "stop_regex", None)):
        name = names("best_effort")
        raise invalid(f"{name} cannot be used with stop strings: they cut the text it checks.", name, "invalid_value")
    if fields.any_whitespace and found.kind not in JSON_KINDS:
        raise invalid(
            f"{names('any_whitespace')} goes with JSON, not with {found.field}.",
            names("any_whitespace"),
            "invalid_value",
        )
    within_budget = fields.complete_within_budget
    return Constraint(
        kind=found.kind,
        source=found.source,
        best_effort=bool(fields.best_effort),
        any_whitespace=bool(fields.any_whitespace),
        complete_within_budget=within_budget is not False,
        jump_forward=fields.jump_forward is not False,
        # Half a JSON document is worth nothing; half a text of another grammar may be what was asked for.
        refuse_small_budget=found.kind == "json_schema" or within_budget is True,
        field="" if found.field == found.kind else found.field,
    )


def _field(name: str, kind: str, value: Any) -> _Found:
    """A source as text: objects and lists are written as JSON. An empty one is no wish for no constraint: refused."""
    if value == "":
        raise invalid(f"{name} is empty; leave it out where nothing is to be constrained.", name, "bad_constraint")
    return _Found(name, kind, value if isinstance(value, str) else msgspec.json.encode(value).decode())


def _response_format(wishes: dict[str, Any]) -> list[_Found]:
    name = "response_format"
    kind = wishes.get("type")
    if not wishes or kind == "text":
        return []
    if kind == "structural_tag":
        return [_field(name, "structural_tag", wishes)]
    if not isinstance(kind, str) or kind not in _FORMAT_FIELDS:
        raise invalid(
            "response_format.type must be text, json_object, json_schema or structural_tag.",
            "response_format.type",
            "invalid_value",
        )
    _refuse_unknown(name, wishes, _FORMAT_FIELDS[kind])
    if kind == "json_object":
        return [_Found(name, "json_schema", ANY_OBJECT)]
    inner = wishes.get("json_schema")
    if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict | bool):
        path = "response_format.json_schema.schema"
        raise invalid(f"{path} must be a JSON schema.", path, "missing_required_parameter")
    _refuse_unknown("response_format.json_schema", inner, _SCHEMA_FIELDS)
    return [_field("response_format.json_schema", "json_schema", inner["schema"])]


def _structured_outputs(wishes: dict[str, Any]) -> list[_Found]:
    name = "structured_outputs"
    _refuse_unknown(name, {key: 0 for key, value in wishes.items() if value}, {*_STRUCTURED, "json_object"})
    found = []
    for key, kind in _STRUCTURED.items():
        value = wishes.get(key)
        if value is None:
            continue
        wanted = {"regex": str, "ebnf": str, "lark": str, "choice": list}.get(kind, str | dict | bool)
        if not isinstance(value, wanted):
            raise invalid(f"{name}.{key} has the wrong type.", f"{name}.{key}", "invalid_type")
        found.append(_field(f"{name}.{key}", kind, value))
    if wishes.get("json_object"):
        found.append(_Found(f"{name}.json_object", "json_schema", ANY_OBJECT))
    return found


def _refuse_unknown(name: str, given: dict[str, Any], known: set[str]) -> None:
    for key in given:
        if key not in known:
            raise invalid(f"{name}.{key} cannot be honoured.", f"{name}.{key}", "unsupported_parameter")
