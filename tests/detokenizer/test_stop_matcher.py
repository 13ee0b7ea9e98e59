"""Stop strings: found as str.find finds them, however the text is cut; nothing shown is ever taken back."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from services.detokenizer.stops import StopMatcher

letters = st.text(alphabet="ab你", max_size=24)
stop_lists = st.lists(st.text(alphabet="ab你", min_size=1, max_size=5), min_size=1, max_size=4)


def cut(text: str, cuts: list[int]) -> list[str]:
    borders = sorted({0, len(text), *(n % (len(text) + 1) for n in cuts)})
    return [text[a:b] for a, b in itertools.pairwise(borders)]


def first_end(text: str, stops: list[str]) -> tuple[int, str] | None:
    """By brute force: the end of the stop that is complete first, and the longest stop with that end."""
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        return None
    end = min(ends)
    return end, max((stop for stop in stops if text[:end].endswith(stop)), key=len)


def run(text: str, stops: list[str], cuts: list[int]) -> tuple[list[str], str]:
    matcher = StopMatcher(tuple(stops))
    shown = []
    for piece in cut(text, cuts):
        part, matched = matcher.push(piece)
        shown.append(part)
        if matched is not None:
            assert matched.name == matched.text
            return shown, matched.name
    shown.append(matcher.flush())
    return shown, ""


@given(letters, stop_lists, st.lists(st.integers(0, 24), max_size=10))
def test_same_as_searching_the_whole_text(text: str, stops: list[str], cuts: list[int]) -> None:
    shown, matched = run(text, stops, cuts)
    expected = first_end(text, stops)
    if expected is None:
        assert ("".join(shown), matched) == (text, "")
    else:
        end, stop = expected
        assert ("".join(shown), matched) == (text[: end - len(stop)], stop)


@given(letters, st.text(alphabet="ab", min_size=1, max_size=4))
def test_one_stop_is_str_find(text: str, stop: str) -> None:
    shown, matched = run(text, [stop], list(range(25)))
    where = text.find(stop)
    assert bool(matched) == (where >= 0)
    assert "".join(shown) == (text if where < 0 else text[:where])


@given(letters, stop_lists)
def test_exactly_the_possible_beginning_of_a_stop_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    shown = ""
    for position, char in enumerate(text):
        part, matched = matcher.push(char)
        shown += part
        if matched:
            return
        seen = text[: position + 1]
        longest = max(
            n for n in range(len(seen) + 1) if any(len(s) > n and s.startswith(seen[len(seen) - n :]) for s in stops)
        )
        assert shown == seen[: len(seen) - longest]


def test_a_stop_over_three_chunks() -> None:
    shown, matched = run("alpha beta gamma delta", ["beta gamma"], [6, 8, 12, 14])
    assert ("".join(shown), matched) == ("alpha ", "beta gamma")


def test_the_first_complete_stop_wins_and_then_the_longest() -> None:
    assert run("xabcd", ["abcd", "bc"], [])[1] == "bc"
    assert run("xabcd", ["bcd", "d", "abcd"], [])[1] == "abcd"


def test_a_stop_at_the_start_and_an_empty_stop() -> None:
    assert run("END and more", ["END", ""], [1, 2]) == (["", "", ""], "END")
    assert run("text", [""], [2]) == (["te", "xt", ""], "")
