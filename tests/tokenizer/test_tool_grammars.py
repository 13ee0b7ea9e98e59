"""The grammars of tools, compiled as the scheduler does it: what may be called is callable, what is begun is valid."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.errors import ApiError, invalid
from services.tokenizer.tools import definitions, enforcement, formats
from services.tokenizer.tools.emitter import Emitter
from services.tokenizer.tools.formats import Format
from services.tokenizer.tools.grammars import not_beginning_with
from services.tokenizer.tools.pieces import Parsed
from shared.messages.request import Constraint

sys.path.insert(0, str(Path(__file__).parent.parent / "scheduler" / "constraint"))
from constraint_kit import accepts, build, sample

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "pattern": "^[A-Z][a-z]{1,8}$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "unit": {"enum": ["C", "F", None]},
    },
    "required": ["city"],
}
CLOCK = {"type": "object", "properties": {"zones": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "description": "?", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock.now", "parameters": CLOCK}},
]
FORMATS = [formats.HERMES, formats.LLAMA3, formats.MISTRAL, formats.MISTRAL_ARGS, formats.PYTHONIC]
LABELS = ["hermes", "llama3", "mistral-list", "mistral-args", "pythonic"]
FRAMES: dict[str, Callable[[str, str], str]] = {
    "hermes": lambda name, args: f'<tool_call>\n{{"name": "{name}", "arguments": {args}}}\n</tool_call>',
    "llama3": lambda name, args: f'{{"name": "{name}", "parameters": {args}}}',
    "mistral-list": lambda name, args: f'[TOOL_CALLS][{{"name": "{name}", "arguments": {args}}}]',
    "mistral-args": lambda name, args: f"[TOOL_CALLS]{name}[ARGS]{args}",
}
each_format = pytest.mark.parametrize(("label", "form"), [*zip(LABELS, FORMATS, strict=True)], ids=LABELS)


def matcher(form: Format, choice: Any, own: Constraint | None = None, parallel: bool = True) -> Any:
    box = definitions.read(TOOLS, choice, parallel)
    constraint = enforcement.constrain(own, box, form)
    assert constraint is not None
    return build(constraint.kind, constraint.source)


def parse(form: Format, text: str) -> Parsed:
    numbers = itertools.count()
    out = Emitter(lambda: f"call_{next(numbers)}")
    parser = form.parser({"weather", "clock.now"}, out)
    parser.feed(text)
    parser.finish()
    parsed = Parsed(calls=[])
    for piece in out.take():
        parsed.add(piece)
    return parsed


def spelled(label: str, name: str, arguments: dict[str, Any]) -> str:
    if label == "pythonic":
        return f"[{name}({', '.join(f'{key}={json.dumps(value)}' for key, value in arguments.items())})]"
    return FRAMES[label](name, json.dumps(arguments, separators=(",", ":")))


@each_format
def test_required_allows_calls_and_nothing_else(label: str, form: Format) -> None:
    grammar = matcher(form, "required")
    assert accepts(grammar, spelled(label, "weather", {"city": "Paris", "days": 3}))
    assert accepts(grammar, spelled(label, "clock.now", {}))
    for text in ("", "Hello", spelled(label, "weather", {"town": "Paris"}), spelled(label, "other", {})):
        assert not accepts(grammar, text), text


@each_format
def test_a_named_tool_is_the_only_one(label: str, form: Format) -> None:
    grammar = matcher(form, {"type": "function", "function": {"name": "clock.now"}})
    assert accepts(grammar, spelled(label, "clock.now", {}))
    assert not accepts(grammar, spelled(label, "weather", {"city": "Paris"}))
    twice = spelled(label, "clock.now", {}) + spelled(label, "clock.now", {})
    assert not accepts(grammar, twice)


@each_format
def test_auto_is_free_until_a_call_begins(label: str, form: Format) -> None:
    grammar = matcher(form, "auto")
    good = spelled(label, "weather", {"city": "Rome"})
    for text in ("", 'Hello, [1, 2] and {"a": 1}!\n', " {", "[", '{"x": 1}', good):
        assert accepts(grammar, text), text
    assert not accepts(grammar, good.replace("city", "town"))
    assert not accepts(grammar, good.replace("weather", "wether"))


@each_format
def test_what_is_sampled_from_required_is_a_valid_call(label: str, form: Format) -> None:
    """The grammar and the parser speak of the same texts."""
    grammar = matcher(form, "required", parallel=False)
    found = 0
    for seed in range(12):
        text = sample(grammar, np.random.default_rng(seed))
        if text is None:
            continue
        parsed = parse(form, text)
        assert parsed.text == "", text
        [call] = parsed.calls
        schema = {**(WEATHER if call.name == "weather" else CLOCK), "additionalProperties": False}
        if label == "pythonic":
            schema = {"type": "object", "required": schema.get("required", [])}  # bounds and patterns are not held
        jsonschema.validate(json.loads(call.arguments), schema)
        found += 1
    assert found >= 6


@each_format
def test_an_answer_with_a_schema_or_a_call(label: str, form: Format) -> None:
    own = Constraint("json_schema", '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}')
    grammar = matcher(form, "auto", own)
    assert accepts(grammar, '{"a":1}')
    mark = "<|python_tag|>" if label == "llama3" else ""  # a bare object would begin as the answer does
    assert accepts(grammar, mark + spelled(label, "weather", {"city": "Rome"}))
    assert not accepts(grammar, "Hello")


def test_strict_holds_the_whole_schema_and_others_what_can_be_held() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "format": "postcode"}}, "if": {}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "odd", "parameters": odd}}
    for strict in (False, True):
        tool["function"]["strict"] = strict  # type: ignore[index]
        box = definitions.read([tool], "required", True)
        constraint = enforcement.constrain(None, box, formats.HERMES)
        assert constraint is not None
        if strict:
            with pytest.raises(ValueError, match=r"postcode|if"):
                build(constraint.kind, constraint.source)
        else:
            grammar = build(constraint.kind, constraint.source)
            assert accepts(grammar, FRAMES["hermes"]("odd", '{"a":"x"}'))
            assert not accepts(grammar, FRAMES["hermes"]("odd", '{"a":1}'))


def test_a_refused_schema_is_told_by_its_tool() -> None:
    tool = {
        "type": "function",
        "function": {"name": "bad", "parameters": {"type": "object", "properties": {"a": {"type": "stuff"}}}},
    }
    box = definitions.read([TOOLS[0], tool], "auto", True)
    constraint = enforcement.constrain(None, box, formats.HERMES)
    assert constraint is not None
    with pytest.raises(ValueError, match="stuff") as refused:
        build(constraint.kind, constraint.source)
    error = enforcement.explain(invalid(f"structural_tag: {refused.value}", "structural_tag"), box)
    assert isinstance(error, ApiError)
    assert error.param == "tools[1].function.parameters"
    assert "tags" not in error.message


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet='{"name<|pyt \n[', max_size=12))
def test_texts_that_begin_otherwise(text: str) -> None:
    import re

    pattern = re.compile(not_beginning_with(('{ "name"', "<|py")))
    begun = re.match(r'\s*(\{\s*"name"|<\|py)', text)
    assert (pattern.fullmatch(text) is None) == (begun is not None)
