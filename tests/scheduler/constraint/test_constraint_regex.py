"""Regular expressions: every feature of the dialect, judged by Python's own `re`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from services.scheduler.constraint.errors import BadSource

sys.path.insert(0, str(Path(__file__).parent))
from constraint_kit import build, check_accepted, check_refused, check_sampled

# pattern, the same for Python's re where it is spelled differently, texts accepted, texts refused (good¦bad)
TABLE = [
    ("abc", "", ["abc"], ["ab", "ab¦d", "abc¦c"]),
    ("a|bc|", "", ["a", "bc", ""], ["b", "¦c"]),
    ("[abc]+", "", ["a", "cab"], ["", "a¦d"]),
    ("[^abc\n]+", "", ["xyz", "中"], ["¦a", "x¦c", "x¦\n"]),
    ("[a-f0-9]{2,4}", "", ["a0", "ffff"], ["a", "abcd¦e", "¦g"]),
    ("a{3}", "", ["aaa"], ["aa", "aaa¦a"]),
    ("a{2,}", "", ["aa", "aaaaaa"], ["a", "aa¦b"]),
    ("a{0,2}b", "", ["b", "aab"], ["aa¦a"]),
    ("ab?c", "", ["ac", "abc"], ["ab¦b"]),
    ("a*b+", "", ["b", "aaabb"], ["aa", "b¦a"]),
    ("a*?b+?", "", ["b", "aabb"], ["aa", "b¦a"]),
    ("(ab|cd)+", "", ["ab", "abcdab"], ["a", "ab¦d"]),
    ("(?:ab){2}", "", ["abab"], ["ab", "abab¦a"]),
    ("(?P<y>[0-9]{4})-(?P<m>[0-9]{2})", "", ["2024-05"], ["2024¦5", "2024-0"]),
    ("(?<y>[0-9]{4})", "[0-9]{4}", ["2024"], ["20"]),
    (r"\d+", "[0-9]+", ["0", "12345"], ["¦a", "1¦١"]),
    (r"[\d.]+", "[0-9.]+", ["1.2.3"], ["1¦a"]),
    (r"\D+", "", ["ab"], ["¦1"]),
    (r"\w+", "", ["a_1", "中文"], ["¦ ", "a¦-"]),
    (r"\W", "", [" ", "-"], ["¦a"]),
    (r"a\sb", "", ["a b", "a\tb", "a\nb"], ["a¦b"]),
    (r"\S+", "", ["a中"], ["a¦ "]),
    (r".+", "", ["hello 中文 😀"], ["a¦\n"]),
    (r"(?s:.)+", "", ["a\nb"], [""]),
    (r"(.|\n)+", "", ["a\n\nb"], [""]),
    (r"(?i)abc", "", ["aBC", "ABC"], ["¦x"]),
    (r"a(?i:b)c", "", ["abc", "aBc"], ["a¦c", "aB¦C"]),
    (r"(?x) a b  c", "", ["abc"], ["a¦ "]),
    (r"^abc$", "", ["abc"], ["abc¦d", "¦^"]),
    (r"(^a|b)c", "", ["ac", "bc"], ["¦c"]),
    (r"\Aab\z", "ab", ["ab"], ["a"]),
    (r"\.\*\+\?\(\)\[\]\{\}\|\\\^\$", "", [".*+?()[]{}|\\^$"], ["¦a", ".¦."]),
    (r"a/b\/c", "", ["a/b/c"], ["a¦b"]),
    (r'"[^"]*"', "", ['""', '"x中"'], ['"', '""¦"']),
    (r"\n\t\r", "", ["\n\t\r"], ["¦n"]),
    (r"\x41\x{4e2d}\u4e2d", "A中中", ["A中中"], ["A¦B"]),
    (r"[\u4e00-\u9fa5]{2,4}", "", ["中文", "中文漢字"], ["中", "¦a", "中文漢字¦中"]),
    (r"[一-龥]+。", "", ["你好。"], ["。¦", "你好"]),
    (r"(中|国|😀){2}", "", ["中国", "😀😀"], ["中", "¦a"]),
    (r"[😀-😎]+", "", ["😀", "😎😃"], ["¦a", "😀¦中"]),
    (r"\p{L}+", r"[^\W\d_]+", ["abc", "é中"], ["¦1", "a¦ "]),
    (r"\p{Han}{2}", r"[\u2e80-\U0003ffff]{2}", ["中文"], ["¦a"]),
    (r"[[:alpha:]]+", "[A-Za-z]+", ["aZ"], ["a¦1"]),
    (r"[a-z&&[^aeiou]]+", "[b-df-hj-np-tv-z]+", ["xyz"], ["¦a"]),
    (r"[]a]+", "", ["]a]"], ["¦b"]),
    (r"[a\-z]+", "", ["a-z"], ["¦b"]),
    (r"(a(b(c)?)?)+", "", ["a", "ab", "abcab"], ["abc¦c"]),
    (r"yes|yesterday", "", ["yes", "yesterday"], ["ye", "yes¦s"]),
    (r"[a-z]{1,500}", "", ["a" * 500], ["a" * 500 + "¦a"]),
    (
        r"(25[0-5]|2[0-4][0-9]|1?[0-9]{1,2})(\.(25[0-5]|2[0-4][0-9]|1?[0-9]{1,2})){3}",
        "",
        ["1.2.3.255"],
        ["25¦6", "1.2"],
    ),
    (r"[\w.+-]+@[\w-]+\.[\w.]+", r"[^@\s]+@[^@\s.]+\.[^@\s]+", ["a.b@engine.example.com"], ["a¦ ", "¦@"]),
    (
        r"\{\s*\"name\"\s*:\s*\"[^\"]+\"\s*,\s*\"age\"\s*:\s*\d+\s*\}",
        r"\{\s*\"name\"\s*:\s*\"[^\"]+\"\s*,\s*\"age\"\s*:\s*[0-9]+\s*\}",
        ['{"name":"李","age":3}', '{ "name" : "A" , "age" : 30 }'],
        ['{"name":"¦"'],
    ),
]
TABLE = [row for row in TABLE if row[3] != ["。¦", "你好"]] + [(r"[一-龥]+。", "", ["你好。"], ["¦。", "你好"])]

REFUSED = [
    ("", "empty"),
    ("(", "unclosed group"),
    (")", "unopened group"),
    ("[a", "unclosed character class"),
    ("a{9,2}", "repetition count range"),
    ("foo**", "quantifier cannot follow"),
    ("a*+", "quantifier cannot follow"),
    ("a{2}{3}", "quantifier cannot follow"),
    ("*a", "nothing to repeat|missing expression"),
    ("^+[a-z]$", "anchor cannot be repeated"),
    ("^{2}x$", "anchor cannot be repeated"),
    ("\\", "backslash at the end"),
    ("abc\\", "backslash at the end"),
    ("a(?=x)", "look-around"),
    ("(?!x)a", "look-around"),
    ("(?<=x)*", "look-around"),
    ("a(?<!x)", "look-around"),
    (r"(a)\1", "backreferences"),
    (r"\bfoo", r"\\b is not supported"),
    ("a$b", r"\$ inside"),
    (r"a\q", "unrecognized escape"),
    ("(?#c)a", "unrecognized flag"),
    ("(?>a)", "unrecognized flag"),
    ("a{,3}", "decimal"),
    ("[z-a]", "range"),
    (r"\p{Nope}", "property not found"),
    ("(?x)a # b\nc", "verbose"),
    ("(" * 5000 + ")" * 5000, "nested deeper"),
]


@pytest.mark.parametrize(("pattern", "python", "accepted", "refused"), TABLE, ids=[row[0][:30] for row in TABLE])
def test_regex_table(pattern: str, python: str, accepted: list[str], refused: list[str]) -> None:
    matcher = build("regex", pattern)
    judge = re.compile(python or pattern)
    for text in accepted:
        assert judge.fullmatch(text)
        check_accepted(matcher, text)
    for text in refused:
        assert not judge.fullmatch(text.replace("¦", ""))
        check_refused(matcher, text)
    check_sampled(matcher, lambda text: judge.fullmatch(text) is not None)


@pytest.mark.parametrize(("pattern", "reason"), REFUSED, ids=[row[0][:20] for row in REFUSED])
def test_regex_that_cannot_be_enforced_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(BadSource) as caught:
        build("regex", pattern)
    assert re.search(reason, caught.value.reason)


def test_regex_errors_name_the_column() -> None:
    for pattern, column in [("ab(?=x)", 3), ("foo**", 5), ("ab(", 3), ("x(a)\\1", 5)]:
        with pytest.raises(BadSource) as caught:
            build("regex", pattern)
        assert caught.value.place == f"column {column}"
