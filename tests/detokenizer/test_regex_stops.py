"""Stop patterns: found as brute force finds them however the text is cut, held back exactly, bounded in cost."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer.regex_stops import MAX_HELD, MixedMatcher
from services.detokenizer.stops import StopMatcher
from shared.stop_regex import BadPattern, check_patterns, compile_pattern

letters = st.text(alphabet="ab1 你", max_size=20)
atoms = st.sampled_from(
    ["a", "b", "1", "你", "[ab]", "[^a]", r"\d", r"\w", r"\s", ".", "(?:ab|b1)", "(?i:A)", r"[\d你]"]
)
repeats = st.sampled_from(["", "", "", "?", "*", "+", "{2}", "{1,3}", "{2,}", "*?"])
pieces = st.tuples(atoms, repeats).map("".join)
sequences = st.lists(pieces, min_size=1, max_size=4).map("".join)
patterns = st.lists(sequences, min_size=1, max_size=3).map("|".join)
cuttings = st.lists(st.integers(0, 20), max_size=6)


def run(text: str, matcher: MixedMatcher | StopMatcher, cuts: list[int]) -> tuple[str, str, str]:
    """(shown, name of the stop, text it matched)."""
    borders = sorted({0, len(text), *(n % (len(text) + 1) for n in cuts)})
    shown = ""
    for first, last in itertools.pairwise(borders):
        part, matched = matcher.push(text[first:last])
        shown += part
        if matched is not None:
            return shown, matched.name, matched.text
    return shown + matcher.flush(), "", ""


def first_match(text: str, pattern: str) -> tuple[int, int] | None:
    """By brute force: the earliest end of any match, and the earliest beginning with that end."""
    whole = re.compile(f"(?:{pattern})")
    for end in range(1, len(text) + 1):
        for start in range(end):
            if whole.fullmatch(text, start, end):
                return start, end
    return None


@given(letters, patterns, cuttings)
def test_same_as_looking_at_every_part_of_the_text(text: str, pattern: str, cuts: list[int]) -> None:
    if re.fullmatch(pattern, ""):
        with pytest.raises(BadPattern, match="empty text"):
            compile_pattern(pattern)
        return
    expected = first_match(text, pattern)
    shown, name, matched = run(text, MixedMatcher((), (pattern,)), cuts)
    if expected is None:
        assert (shown, name) == (text, "")
    else:
        start, end = expected
        assert (shown, name, matched) == (text[:start], pattern, text[start:end])


@given(letters, st.text(alphabet="ab1", min_size=1, max_size=4))
def test_exactly_what_may_still_match_is_held_back(text: str, stop: str) -> None:
    strings, expressions = StopMatcher((stop,)), MixedMatcher((), (stop,))
    for char in text:
        pushed = strings.push(char)
        assert expressions.push(char) == pushed
        if pushed[1] is not None:
            return


@given(letters, patterns, cuttings)
def test_the_end_of_the_text_so_far_is_where_a_token_ends(text: str, pattern: str, cuts: list[int]) -> None:
    if re.fullmatch(pattern, ""):
        return
    pattern = f"(?:{pattern})$"
    whole = re.compile(pattern[:-1])
    borders = sorted({0, len(text), *(n % (len(text) + 1) for n in cuts)})
    matches = ((start, end) for end in borders[1:] for start in range(end) if whole.fullmatch(text, start, end))
    expected = next(matches, None)
    shown, name, matched = run(text, MixedMatcher((), (pattern,)), cuts)
    if expected is None:
        assert (shown, name) == (text, "")
    else:
        start, end = expected
        assert (shown, name, matched) == (text[:start], pattern, text[start:end])


def test_strings_and_patterns_together() -> None:
    assert run("pay 12 EUR now", MixedMatcher(("now",), (r"\d+ EUR", "never")), [5, 8]) == (
        "pay ",
        r"\d+ EUR",
        "12 EUR",
    )
    assert run("pay 12 now", MixedMatcher(("now",), (r"\d+ EUR",)), [5, 8]) == ("pay 12 ", "now", "now")
    assert run("xab", MixedMatcher(("b",), ("ab",)), []) == ("x", "ab", "ab")  # the longer of two that end together


def test_what_is_held_back_is_bounded_and_the_stop_still_works() -> None:
    matcher = MixedMatcher((), ("<[^>]*>",))
    shown, matched = matcher.push("text <" + "a" * (3 * MAX_HELD))
    assert matched is None
    assert len(shown) == len("text <") + 2 * MAX_HELD
    rest, matched = matcher.push("bc> and more")
    assert matched is not None
    assert (rest, matched.name, len(matched.text)) == ("", "<[^>]*>", MAX_HELD + 3)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("a*", "empty text"),
        ("", "empty text"),
        ("(", "not a valid regular expression"),
        ("[a", "not a valid regular expression"),
        ("a{9,2}", "not a valid regular expression"),
        ("^a", "anchors"),
        ("a$b", "anchors"),
        ("(?m)a$", "anchors"),
        ("a*$", "empty text"),
        (r"\bword\b", "word boundaries"),
        (r"(a)\1", "back-references"),
        ("(?=x)y", "look-around"),
        ("(?<!x)y", "look-around"),
        ("(?>a+)b", "not supported"),
        ("a++", "not supported"),
        ("(a{1000}){1000}", "too large"),
        ("a{1,100000}", "too large"),
        ("((((a?){100})*){100})*b", "too large"),
        ("a{99999999999}", "regular expression"),
        ("(" * 500 + "a" + ")" * 500, "nested too deeply"),
    ],
)
def test_what_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(BadPattern, match=reason):
        compile_pattern(pattern)


def test_all_patterns_of_a_request_are_bounded_together() -> None:
    pattern = "|".join(f"{number}word" for number in range(8))
    check_patterns([pattern] * 3)
    with pytest.raises(BadPattern, match=r"^'0word.*together with those before it"):
        check_patterns([pattern] * 4)
    with pytest.raises(BadPattern, match=r"^'\('"):
        check_patterns(["fine", "("])


def test_patterns_that_kill_backtrackers_cost_a_bounded_number_of_moves() -> None:
    for pattern in ("(a+)+b", "(a|a)*b", "(a|aa)+b", "(.*a){10}b", ".*.*.*=.*b"):
        program = compile_pattern(pattern)
        assert sum(map(len, program.follow)) < 500
        matcher = MixedMatcher((), (pattern,))
        for _ in range(20):
            assert matcher.push("a" * 100)[1] is None
        assert sum(len(run.threads) for run in matcher._runs) <= len(program.tests)
