"""The parsers of tool calls: any pieces of a text give the same calls and the same words."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.tools import formats
from services.tokenizer.tools.emitter import Emitter
from services.tokenizer.tools.formats import Format
from services.tokenizer.tools.pieces import Parsed
from services.tokenizer.tools.python_literal import NotLiteral, arguments

NAMES = frozenset(("f", "get_weather", "a.b-c"))
FORMATS = [formats.HERMES, formats.LLAMA3, formats.MISTRAL, formats.PYTHONIC]
each_format = pytest.mark.parametrize("form", FORMATS, ids=[form.name for form in FORMATS])
WORDS = [
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]x1", "<|python_start|>"),
    *(
        '{"name": "f", "arguments": {"a": [1, "}\\""]}}',
        '{"name":"f","parameters":{}}',
        '{"name": "zz"}',
        '{"name": "f"}',
    ),
    *('{"arguments": {"b": null}, "name": "f"}', '{"name": "f", "arguments": "{\\"a\\": 1}"}', '"arguments": null'),
    *(
        "[f(a=1, b='x)'), f()]",
        "f(",
        "get_weather",
        "a.b-c",
        "[",
        "]",
        "{",
        "}",
        "(",
        ")",
        ",",
        ";",
        ":",
        '"',
        "'",
        "\\",
    ),
    *("Hello", " ", "\n", "\u00e9\u9f9c\U0001fae0", '"name"', "<", "|", "="),
]


def parse(form: Format, pieces: list[str]) -> tuple[str, list[tuple[str, str, str]]]:
    numbers = itertools.count()
    out = Emitter(lambda: f"call_{next(numbers)}")
    parser = form.parser(NAMES, out)
    for piece in pieces:
        parser.feed(piece)
    parser.finish()
    parsed = Parsed(calls=[])
    for piece in out.take():
        parsed.add(piece)
    return parsed.text, [(call.id, call.name, call.arguments) for call in parsed.calls]


@pytest.mark.parametrize("form", FORMATS, ids=[form.name for form in FORMATS])
@settings(max_examples=120, deadline=None)
@given(words=st.lists(st.sampled_from(WORDS), max_size=14), cuts=st.lists(st.integers(0, 300), max_size=8))
def test_any_pieces_give_the_same_parse(form: Format, words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    edges = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    whole = parse(form, [text])
    assert parse(form, [text[a:b] for a, b in itertools.pairwise(edges)]) == whole
    assert parse(form, list(text)) == whole


@each_format
@given(text=st.text(alphabet="abc .,\n", max_size=40))
def test_plain_text_stays_as_it_is(form: Format, text: str) -> None:
    assert parse(form, list(text)) == (text, [])


def test_hermes() -> None:
    text = (
        "Let me look.\n"
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"b": 1}, "name": "f"}</tool_call>\n'
    )
    said, calls = parse(formats.HERMES, [text])
    assert said == "Let me look."
    assert calls == [("call_0", "get_weather", '{"city": "Paris"}'), ("call_1", "f", '{"b": 1}')]


@pytest.mark.parametrize(
    "text", ["use <tool_call> like this ", '<tool_call>{"name": "unknown"}</tool_call>', "<tool_call>oops", "<tool_c"]
)
def test_what_only_looks_like_a_call_is_text(text: str) -> None:
    assert parse(formats.HERMES, list(text)) == (text, [])


def test_arguments_that_are_no_object() -> None:
    for written, meant in (('"{\\"a\\": 1}"', {"a": 1}), ("null", {}), ("{}", {})):
        _, [call] = parse(formats.HERMES, list(f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'))
        assert json.loads(call[2]) == meant
    _, [call] = parse(formats.HERMES, ['<tool_call>{"name": "f"}'])
    assert call[2] == "{}"


def test_llama3() -> None:
    for text in (
        '{"name": "f", "parameters": {"a": 1}}',
        '<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
        ' \n{"name": "f", "arguments": {"a": 1}} ',
    ):
        assert parse(formats.LLAMA3, [text]) == ("", [("call_0", "f", '{"a": 1}')])
    two = '{"name": "f", "parameters": {}}; {"name": "a.b-c", "parameters": {}}'
    assert [call[1] for call in parse(formats.LLAMA3, [two])[1]] == ["f", "a.b-c"]
    assert parse(formats.LLAMA3, ['{"a": {"name": "f"}}']) == ('{"a": {"name": "f"}}', [])


def test_mistral() -> None:
    text = 'Ok [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {}}]'
    assert parse(formats.MISTRAL, [text]) == ("Ok", [("call_0", "f", '{"a": 1}'), ("call_1", "get_weather", "{}")])
    text = '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]q1[ARGS]{}'
    assert parse(formats.MISTRAL, [text]) == ("", [("call_0", "f", '{"a": 1}'), ("call_1", "get_weather", "{}")])
    assert parse(formats.MISTRAL, ['[TOOL_CALLS]zz{"a": 1}']) == ('[TOOL_CALLS]zz{"a": 1}', [])


def test_pythonic() -> None:
    text = "[f(a=1, b=\"it's ) ]\", c={'k': [True, None, -2.5]}), a.b-c()]"
    said, calls = parse(formats.PYTHONIC, [text])
    assert said == ""
    assert [call[1] for call in calls] == ["f", "a.b-c"]
    assert json.loads(calls[0][2]) == {"a": 1, "b": "it's ) ]", "c": {"k": [True, None, -2.5]}}
    for other in ("[1, 2, 3]", "[zz()]", "[f(open('x'))]", "[f(1)]", "[f(a=b)]", "f(a=1)"):
        assert parse(formats.PYTHONIC, list(other)) == (other, [])


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,6}", fullmatch=True).filter(lambda name: name not in ("None", "True", "False")),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-(10**12), 10**12)
            | st.floats(allow_nan=False, allow_infinity=False)
            | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text("ab'\"", max_size=3), inner, max_size=3)
            ),
            max_leaves=6,
        ),
        max_size=4,
    )
)
def test_python_literals_are_read_as_python_writes_them(values: dict[str, object]) -> None:
    text = ", ".join(f"{name}={value!r}" for name, value in values.items())
    assert arguments(text) == values


@pytest.mark.parametrize(
    "text", ["a=1, a=2", "a=[1", "a=" + "[" * 500, "a=__import__('os')", "a=1+1", "**{}", "a=(", "a", "a=1 b=2"]
)
def test_other_python_is_refused(text: str) -> None:
    with pytest.raises(NotLiteral):
        arguments(text)


def test_formats_are_guessed_from_the_chat_template() -> None:
    assert formats.choose("auto", "{{ '<tool_call>' }}") is formats.HERMES
    assert formats.choose("auto", "[TOOL_CALLS]") is formats.MISTRAL
    assert formats.choose("auto", "[TOOL_CALLS] [ARGS]") is formats.MISTRAL_ARGS
    assert formats.choose("auto", "<|python_tag|>") is formats.LLAMA3
    assert formats.choose("auto", "") is formats.HERMES
    assert formats.choose("pythonic", "<tool_call>") is formats.PYTHONIC


@each_format
def test_written_history_is_read_back(form: Format) -> None:
    """What templates without tools are shown is what the parser reads."""
    calls = [{"function": {"name": "f", "arguments": {"a": 1, "b": "x"}}}, {"function": {"name": "a.b-c"}}]
    said, found = parse(form, [form.write(calls)])
    assert said == ""
    assert [(name, json.loads(written)) for _, name, written in found] == [("f", {"a": 1, "b": "x"}), ("a.b-c", {})]
