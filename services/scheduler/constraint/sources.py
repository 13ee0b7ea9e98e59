"""Turns a canonical source of any kind into the engine's grammar text. Leaves trying it out to the compiler."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from llguidance import LLMatcher

from services.scheduler.constraint.canonical import ANY_JSON, Kind, read_json
from services.scheduler.constraint.errors import BadSource
from services.scheduler.constraint.gbnf import parse_gbnf
from services.scheduler.constraint.gbnf_lark import to_lark
from services.scheduler.constraint.json_escapes import allowed_escapes
from services.scheduler.constraint.limits import Limits, parser_limits
from services.scheduler.constraint.regex_source import ascii_digits, check_regex, explain, first_line
from services.scheduler.constraint.schema_check import check_schema, place_of
from services.scheduler.constraint.structural_tag import structural_tag
from services.scheduler.constraint.vocabulary import Vocabulary
from services.scheduler.constraint.xml_schema import xml_schema

BOUNDED_SPACE = r"\n? {0,20}"
"""White space between JSON tokens where it is allowed: a model cannot fill its budget with it."""


class Options(NamedTuple):
    best_effort: bool = False
    any_whitespace: bool = False


class GrammarText(NamedTuple):
    """`text` is what the engine reads; `document` the JSON behind it, or the places of an XML schema's patterns."""

    text: str
    document: Any = None


def read_source(kind: Kind, text: str, options: Options, limits: Limits, vocabulary: Vocabulary) -> GrammarText:
    """The grammar of a canonical source. Raises BadSource."""
    if kind == "regex":
        return GrammarText(_engine_text([_regex(text, limits)]))
    if kind == "json_schema":
        schema = read_json(text)
        return GrammarText(_engine_text([_json_schema(schema, options, limits)]), schema)
    if kind == "ebnf":
        return GrammarText(_engine_text([_ebnf(text, limits)]))
    if kind == "lark":
        if not text.strip():
            raise BadSource("the grammar is empty")
        return GrammarText(_engine_text([{"lark_grammar": text}]))
    if kind == "choice":
        return GrammarText(_engine_text([_choice(read_json(text), limits)]))
    if kind == "xml_schema":
        lark, places = xml_schema(read_json(text), limits)
        return GrammarText(_engine_text([{"lark_grammar": lark}]), places)
    return GrammarText(_engine_text(_structural_tag(read_json(text), options, limits, vocabulary)))


def explain_error(kind: Kind, grammar: GrammarText, error: str) -> BadSource:
    """The engine's message about a grammar of ours, as a reason and a place in the user's source."""
    reason, place = explain(error)
    if kind == "regex":
        return BadSource(reason, place)
    if kind == "json_schema":
        keys = place_of(grammar.document, error)
        return BadSource(_schema_reason(reason), f"{keys} ({place})" if keys and place else keys or place)
    if kind == "lark":
        at = error.removeprefix("at ").split("(", 1)[0]
        line = f"line {at}" if at.isdigit() else ""
        return BadSource(reason, f"{line}, {place}" if line and place else line or place)
    if kind == "xml_schema":
        return BadSource(reason, _xml_place(grammar.document, error, place))
    return BadSource(first_line(error))


def _xml_place(places: list[str], error: str, column: str) -> str:
    """Terminal i stands in line 3 + i of the grammar."""
    line = re.match(r"at (\d+)\(", error)
    index = int(line[1]) - 3 if line else -1
    at = places[index] if 0 <= index < len(places) else ""
    return f"{at} ({column})" if at and column else at or column


def _schema_reason(reason: str) -> str:
    if reason.startswith("Unimplemented keys: "):
        names = ", ".join(json.loads(reason.removeprefix("Unimplemented keys: ")))
        return f"{names} cannot be enforced (best_effort checks it afterwards)"
    if reason.startswith("oneOf constraints"):
        return "oneOf with branches that may overlap cannot be enforced (best_effort checks it afterwards)"
    return reason


def _engine_text(grammars: list[dict[str, Any]]) -> str:
    return json.dumps({"grammars": grammars})


def _regex(pattern: str, limits: Limits) -> dict[str, Any]:
    check_regex(pattern, limits)
    text: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(ascii_digits(pattern)))["grammars"][0]
    return {"lark_grammar": text["lark_grammar"]}


def _json_schema(schema: Any, options: Options, limits: Limits) -> dict[str, Any]:
    if schema == ANY_JSON:
        schema = {"type": ["object", "array"]}
    check_schema(schema, limits, lenient=options.best_effort)
    own = {} if schema is True else dict(schema)
    own["x-guidance"] = {
        "lenient": options.best_effort,
        "coerce_one_of": options.best_effort,
        "whitespace_flexible": options.any_whitespace,
        "item_separator": ",",
        "key_separator": ":",
        "json_allowed_escapes": allowed_escapes(schema, lenient=options.best_effort),
        **({"whitespace_pattern": BOUNDED_SPACE} if options.any_whitespace else {}),
    }
    return {"json_schema": own}


def _ebnf(text: str, limits: Limits) -> dict[str, Any]:
    return {"lark_grammar": to_lark(parse_gbnf(text, limits))}


def _choice(options: Any, limits: Limits) -> dict[str, Any]:
    if not isinstance(options, list) or not options:
        raise BadSource("must be a list of strings, not empty")
    if len(options) > limits.alternatives:
        raise BadSource(f"more than {limits.alternatives} choices")
    for index, option in enumerate(options):
        if not isinstance(option, str):
            raise BadSource("must be a string", f"#/{index}")
        if not option:
            raise BadSource("must not be empty", f"#/{index}")
    # one terminal: as alternatives of a rule they would each be an item of the parser
    return {"lark_grammar": "start: C\nC: " + " | ".join(json.dumps(o, ensure_ascii=False) for o in options)}


def _structural_tag(source: Any, options: Options, limits: Limits, vocabulary: Vocabulary) -> list[dict[str, Any]]:
    def part(kind: Kind, inner: Any) -> dict[str, Any]:
        if kind != "json_schema" and not isinstance(inner, str):
            raise BadSource("must be a string")
        if kind == "json_schema":
            read = _json_schema(inner, options, limits)
        else:
            read = _regex(inner, limits) if kind == "regex" else _ebnf(inner, limits)
        grammar = GrammarText(_engine_text([read]), inner)
        table, bounds = vocabulary.table, parser_limits(limits)
        failed, messages = LLMatcher.validate_grammar_with_warnings(grammar.text, table, limits=bounds)
        if failed:
            raise explain_error(kind, grammar, messages[0])
        return read

    return structural_tag(source, part, vocabulary.special_id)
