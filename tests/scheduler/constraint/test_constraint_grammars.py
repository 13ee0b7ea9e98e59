"""EBNF, Lark, choices, structural tags and XML: what they accept, and what is refused with its place."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from services.scheduler.constraint.errors import BadSource

sys.path.insert(0, str(Path(__file__).parent))
from constraint_kit import build, check_accepted, check_refused, check_sampled, mask, vocabulary


def _like(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


def _balanced(text: str) -> bool:
    while "()" in text:
        text = text.replace("()", "")
    return not text


EXPRESSION = """
# sums of numbers
root  ::= expr
expr  ::= term (("+" | "-") expr)?
term  ::= [0-9]+
       | "(" expr ")"   # a group
"""
JSON_EBNF = r"""
root   ::= value
value  ::= object | array | string | number | "true" | "false" | "null"
object ::= "{" (member ("," member)*)? "}"
member ::= string ":" value
array  ::= "[" (value ("," value)*)? "]"
string ::= "\"" ([^"\\\x00-\x1f] | "\\" ["\\/bfnrt])* "\""
number ::= "-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)?
"""

EBNF: list[tuple[str, Callable[[str], bool], list[str], list[str]]] = [
    ('root ::= "Hello" | "Hi" | "Hey"', _like("Hello|Hi|Hey"), ["Hello", "Hi"], ["H", "H¦a"]),
    ('root ::= [a-z]* "b"', _like("[a-z]*b"), ["b", "ab", "bbb"], ["a", "¦1"]),
    ('root ::= "a" "bx" | "abc"', _like("abx|abc"), ["abx", "abc"], ["ab", "ab¦d"]),
    ('root ::= ("a" | "b"){2,3}\n   | "c"', _like("[ab]{2,3}|c"), ["ab", "aba", "c"], ["a", "aba¦a"]),
    ('root ::= x{2} y{1,} z{,2}\nx ::= "x"\ny ::= "y"\nz ::= "z"', _like("xxy+z{0,2}"), ["xxy", "xxyyzz"], ["x¦y"]),
    ('root ::= "中"+ [一-龥] "😀"?', _like("中+[一-龥]😀?"), ["中文", "中中中😀"], ["中", "¦a"]),
    (r'root ::= "\u4e2d\x41\U0001F600\n\t\"\\"', _like('中A😀\n\t"\\\\'), ['中A😀\n\t"\\'], ["中¦B"]),
    (r"root ::= [^\x00-\x1f\"\\\]\-]+", _like(r'[^\x00-\x1f"\\\]\-]+'), ["ab中"], ["a¦-", "a¦]"]),
    (r"root ::= [\d_-]+ .", _like(r"[0-9_\-]+[^\n\r]"), ["1-a", "__"], ["¦a"]),
    ("root ::= ws \"{\" ws \"}\"\nws ::= | \" \" ws", _like(" *\\{ *\\}"), ["{}", "  { }"], ["{ ¦{"]),
    ('root ::= "(" root ")" root |', _balanced, ["", "()", "(())()"], ["(", "()¦)"]),
    (EXPRESSION, lambda text: _like(r"[0-9+\-()]+")(text) and _compiles(text), ["1", "1+(2-33)"], ["1+", "(1", "¦)"]),
    (JSON_EBNF, lambda text: _is_json(text), ['{"a":[1,{"b":"中\\n"}]}', "-0.5"], ['{"a"', "[1¦]"[:-1] + "x"]),
]  # fmt: skip


def _compiles(text: str) -> bool:
    compile(re.sub(r"\b0+(?=\d)", "", text), "expression", "eval")
    return True


def _is_json(text: str) -> bool:
    json.loads(text)
    return True


@pytest.mark.parametrize(("source", "judge", "accepted", "refused"), EBNF, ids=[row[0][:30] for row in EBNF])
def test_ebnf_table(source: str, judge: Any, accepted: list[str], refused: list[str]) -> None:
    matcher = build("ebnf", source)
    for text in accepted:
        assert judge(text)
        check_accepted(matcher, text)
    for text in refused:
        check_refused(matcher, text)
    check_sampled(matcher, judge)


@pytest.mark.parametrize(
    ("kind", "source", "place", "reason"),
    [
        ("ebnf", "root ::=", "line 1, column 9", "empty"),
        ("ebnf", "", "", "no rule named root"),
        ("ebnf", 'start ::= "a"', "", "no rule named root"),
        ("ebnf", "root ::= x", "line 1, column 10", "not defined"),
        ("ebnf", 'root ::= "a"\nroot ::= "b"', "line 2, column 1", "twice"),
        ("ebnf", 'root ::= "a', "line 1, column 10", "never closed"),
        ("ebnf", 'root ::= ("a"\nb ::= "c"', "line 1, column 10", "never closed"),
        ("ebnf", 'root ::= "a")', "line 1, column 13", "never opened"),
        ("ebnf", "root ::= [a", "line 1, column 10", "never closed"),
        ("ebnf", "root ::= [z-a]", "line 1, column 11", "backwards"),
        ("ebnf", 'root ::= "a"**', "line 1, column 14", "repeat"),
        ("ebnf", 'root ::= "a"{3,2}', "line 1, column 13", "less than"),
        ("ebnf", r'root ::= "\q"', "line 1, column 11", "escape"),
        ("ebnf", r'root ::= "\xZZ"', "line 1, column 11", "hexadecimal"),
        ("ebnf", 'root = "a"', "line 1, column 6", "::="),
        ("ebnf", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "line 1", "nested deeper"),
        ("lark", "", "", "empty"),
        ("lark", "start: b", "line 1", "unknown name"),
        ("lark", "begin: /a/", "", "start"),
        ("lark", 'start: "a', "line 1", "lexer"),
        ("lark", "start: /(/", "line 1, column 1", "unclosed"),
        ("lark", "start: <|nope|>", "line 1", "unknown special token"),
        ("choice", "[]", "", "not empty"),
        ("choice", "{}", "", "list of strings"),
        ("choice", "nope", "line 1", "not JSON"),
        ("choice", "[1]", "#/0", "string"),
        ("choice", '["a",""]', "#/1", "empty"),
        ("structural_tag", "[]", "", "expected an object"),
        ("structural_tag", '{"foo":1}', "#", "structures"),
        ("structural_tag", '{"structures":[{"schema":{},"end":"x"}],"triggers":["<"]}', "#/structures/0", "begin"),
        (
            "structural_tag",
            '{"structures":[{"begin":"<a>","end":"x"}],"triggers":["["]}',
            "#/structures/0/begin",
            "none of the",
        ),
        ("structural_tag", '{"format":{"type":"nope"}}', "#/format/type", "no format"),
        ("structural_tag", '{"format":{"type":"regex","pattern":"("}}', r"#/format/pattern \(column 1\)", "unclosed"),
        (
            "structural_tag",
            '{"format":{"type":"json_schema","json_schema":{"type":"x"}}}',
            "#/format/json_schema/type",
            "no type",
        ),
    ],
)
def test_grammars_that_cannot_be_read_are_refused(kind: str, source: str, place: str, reason: str) -> None:
    with pytest.raises(BadSource) as caught:
        build(kind, source)
    assert re.search(reason, caught.value.reason)
    assert re.match(place, caught.value.place)


def test_lark() -> None:
    source = 'start: greeting (", " NAME)+ "."\ngreeting: "Hi" | "Hello"\nNAME: /[A-Z][a-z]*/ & ~/Bob/\n'
    matcher = build("lark", source)
    check_accepted(matcher, "Hi, Ada, Eve.")
    for text in ("Hi¦,,"[:3] + "!", "Hi, ¦a", "Hi, Bob¦."):
        check_refused(matcher, text)
    check_sampled(matcher, lambda text: _like(r"(Hi|Hello)(, [A-Z][a-z]*)+\.")(text) and ", Bob," not in text)


def test_choices_of_every_kind_of_text() -> None:
    choices = ["yes", "yesterday", "no way", "中文", "😀😃", 'say "hi"', "back\\slash", "line\nbreak", "a/b", " x"]
    matcher = build("choice", json.dumps(choices))
    for text in choices:
        check_accepted(matcher, text)
    for text in ("ye", "yes¦ ", "中¦国", "¦m"):
        check_refused(matcher, text)
    check_sampled(matcher, lambda text: text in choices)


def test_ten_thousand_choices() -> None:
    choices = [f"choice number {i}" for i in range(10_000)]
    matcher = build("choice", json.dumps(choices))
    check_accepted(matcher, choices[1234])
    check_refused(matcher, "choice number ¦x")


def test_structural_tag_with_triggers() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    source = {
        "type": "structural_tag",
        "structures": [
            {"begin": "<function=f>", "schema": schema | {"additionalProperties": False}, "end": "</function>"},
            {"begin": "<function=g>", "schema": {"type": "integer"}, "end": "</function>"},
        ],
        "triggers": ["<function="],
    }
    matcher = build("structural_tag", json.dumps(source))
    for text in (
        "hello",
        "",
        'so: <function=f>{"a":1}</function> done',
        "<function=g>7</function><function=g>8</function>",
    ):
        check_accepted(matcher, text)
    for text in ("<function=¦h", '<function=f>{"a":¦"', "<function=g>7", "x <function=g>¦x"):
        check_refused(matcher, text)


@pytest.mark.parametrize(
    ("form", "accepted", "refused"),
    [
        ({"type": "const_string", "value": "a中"}, ["a中"], ["a", "¦b"]),
        ({"type": "regex", "pattern": "x+"}, ["xx"], ["¦y"]),
        ({"type": "grammar", "grammar": 'root ::= "a" root | "b"'}, ["aab"], ["aa", "¦c"]),
        ({"type": "json_schema", "json_schema": {"type": "integer"}}, ["12"], ["¦x"]),
        (
            {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
            ["<t></t>", "<t>a < b\n</t>"],
            ["<t>a", "<t></t>¦x"],
        ),
        (
            {
                "type": "sequence",
                "elements": [
                    {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
                    {
                        "type": "or",
                        "elements": [{"type": "regex", "pattern": "[0-9]+"}, {"type": "const_string", "value": "z"}],
                    },
                ],
            },
            ["<t>x</t>12", "<t></t>z"],
            ["<t>x</t>", "<t>x</t>¦a"],
        ),
        (
            {
                "type": "triggered_tags",
                "triggers": ["<a"],
                "tags": [{"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "x+"}, "end": "</a>"}],
                "at_least_one": True,
                "stop_after_first": True,
            },
            ["<a>x</a>", "free <a>xx</a>"],
            ["free", "<a>x</a>¦ "],
        ),
        (
            {
                "type": "tags_with_separator",
                "tags": [{"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "x"}, "end": "</a>"}],
                "separator": ", ",
                "at_least_one": True,
            },
            ["<a>x</a>", "<a>x</a>, <a>x</a>"],
            ["", "<a>x</a>,¦<"],
        ),
    ],
    ids=lambda value: value.get("type") if isinstance(value, dict) else None,
)  # fmt: skip
def test_structural_tag_formats(form: dict[str, Any], accepted: list[str], refused: list[str]) -> None:
    matcher = build("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    for text in accepted:
        check_accepted(matcher, text)
    for text in refused:
        check_refused(matcher, text)


def test_marks_that_are_special_tokens_are_met_by_those_tokens() -> None:
    form = {"type": "tag", "begin": "<|im_start|>", "content": {"type": "regex", "pattern": "x+"}, "end": "<|im_end|>"}
    matcher = build("structural_tag", json.dumps({"type": "structural_tag", "format": form}))
    begin, end = (vocabulary().special_id(text) for text in ("<|im_start|>", "<|im_end|>"))
    assert begin is not None
    assert end is not None
    assert mask(matcher).tolist() == [begin]
    assert matcher.advance([begin])
    assert end not in mask(matcher)
    assert matcher.advance(vocabulary().encode("xx"))
    assert end in mask(matcher)
    assert matcher.advance([end])
    assert matcher.is_complete


def test_special_tokens_are_never_text() -> None:
    matcher = build("regex", "(?s:.)*")
    special = [token for token in range(vocabulary().size) if not vocabulary().all_bytes[token]]
    assert special
    assert set(mask(matcher).tolist()) & set(special) <= set(vocabulary().eos_ids)


def test_xml_schema() -> None:
    content = {"name": None, "age": r"[0-9]{1,3}", "home": {"url": "https?://.+"}, "phones": [{"n": r"\d+"}]}
    matcher = build("xml_schema", json.dumps({"person": content}))
    good = (
        "<person><name>李 &amp; A😀</name><age>42</age><home><url>http://a/b</url></home><phones>{}</phones></person>"
    )
    for text in (good.format(""), good.format("<n>1</n><n>22</n>")):
        check_accepted(matcher, text)
    for text in (
        "<person><name>a<¦b",
        "<person><name>a & "[:-2] + "&¦ ",
        "<person><name></name><age>¦<",
        "<person>¦ ",
        "<person><name>]]¦>",
        "<person><name>¦\x07",
    ):
        check_refused(matcher, text)


XML_REFUSED = [
    ("{}", "", "one member"),
    ('{"a":null,"b":null}', "", "one member"),
    ("[]", "", "one member"),
    ("{", "line 1", "not JSON"),
    ('{"":null}', "#/", "no name"),
    ('{"a b":null}', "#/a b", "no name"),
    ('{"1a":null}', "#/1a", "no name"),
    ('{"a":{}}', "#/a", "names no elements"),
    ('{"a":{"b":5}}', "#/a/b", "must be a pattern"),
    ('{"a":[{"b":null},{"c":null}]}', "#/a", "one round"),
    ('{"a":[{"b":{"c d":null}}]}', "#/a/0/b/c d", "no name"),
    ('{"a":{"b":"x(?=y)"}}', r"#/a/b \(column 2\)", "look-around"),
    ('{"a":{"b":"[0-9]+","c":"x("}}', r"#/a/c \(column 2\)", "unclosed group"),
    ('{"a":{"b":"x\\ny"}}', "#/a/b", "line break"),
    (json.dumps({"a": "x"}).replace('"x"', '{"a":' * 70 + "null" + "}" * 70), "#/a/a", "nested deeper"),
]


@pytest.mark.parametrize(("source", "place", "reason"), XML_REFUSED, ids=[row[0][:40] for row in XML_REFUSED])
def test_xml_schema_errors_name_the_element(source: str, place: str, reason: str) -> None:
    with pytest.raises(BadSource) as caught:
        build("xml_schema", source)
    assert re.search(reason, caught.value.reason)
    assert re.match(place, caught.value.place)


def test_sampled_xml_always_parses() -> None:
    source = {"person": {"name": "[A-Z][a-z]{1,8}", "age": r"\d{1,3}", "notes": [{"note": ".{0,20}"}]}}
    shape = re.compile(
        r"<person><name>[A-Z][a-z]{1,8}</name><age>[0-9]{1,3}</age><notes>(<note>[^<]*</note>)*</notes></person>"
    )

    def judge(text: str) -> bool:
        for note in ElementTree.fromstring(text).iter("note"):
            assert len(note.text or "") <= 20
        return shape.fullmatch(text) is not None

    check_sampled(build("xml_schema", json.dumps(source)), judge)
