"""What is guessed under a grammar: by its form, as its earlier texts have it, and by the words of the prompt."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.habits import (
    BORDER,
    LONGEST_CONTEXT,
    MOST_GRAMMARS,
    PLACES,
    WINDOW,
    Case,
    CaseOdds,
    FormForesight,
    Habits,
    look_up,
)
from shared import ints
from shared.messages.request import Constraint

TOKENS = st.integers(0, 4) | st.sampled_from([256, 65536, 1 << 24])
SCHEMA, OTHER = Constraint("json_schema", "{}"), Constraint("regex", "{}")


def expected(text: list[int], tail: list[int]) -> tuple[int, Case] | None:
    for length in range(min(LONGEST_CONTEXT, len(tail)), 0, -1):
        context = tail[-length:]
        behind = [text[p + length] for p in range(len(text) - length) if text[p : p + length] == context]
        lately = behind[: -PLACES - 1 : -1]
        if lately:
            return lately[0], Case(length, lately.count(lately[0]), len(lately))
    return None


@given(st.lists(TOKENS, max_size=50), st.lists(TOKENS, min_size=1, max_size=8))
def test_the_longest_context_says_what_follows(text: list[int], tail: list[int]) -> None:
    found = look_up(ints.pack(text), ints.pack(tail), CaseOdds())
    wanted = expected(text, tail)
    assert (found is None) == (wanted is None)
    if found is not None and wanted is not None:
        assert ints.unpack(found.token)[0] == wanted[0]
        assert found.case == wanted[1]


def test_the_end_of_a_text_is_no_guess() -> None:
    text = ints.pack([1, 2, 3]) + BORDER + ints.pack([9, 3, 4]) + BORDER
    shorter = look_up(text, ints.pack([2, 3]), CaseOdds())
    assert shorter is not None
    assert ints.unpack(shorter.token).tolist() == [4]
    assert look_up(text, ints.pack([7, 4]), CaseOdds()) is None


def request(prompt: list[int], output: list[int]) -> Any:
    return SimpleNamespace(
        output=ints.unpack(ints.pack(output)), prompt_length=len(prompt), known=len(prompt) + len(output)
    )


def foresight(prompt: list[int], forms: bytearray) -> FormForesight:
    return FormForesight(ints.pack(prompt), forms, CaseOdds(), CaseOdds())


def test_the_form_comes_from_texts_before_and_the_words_from_the_prompt() -> None:
    """name = A B; age = 7  after texts with other names and ages."""
    habits = Habits()
    open_, name, is_, age, end = 100, 101, 102, 103, 104
    for who, years in (([1, 2], 11), ([3, 4, 5], 12), ([6, 8], 13)):
        habits.add(b"", SCHEMA, ints.pack([open_, name, is_, *who, age, is_, years, end]))
    prompt = [50, 21, 22, 23, 51]
    seen = foresight(prompt, habits.of(b"", SCHEMA))
    output: list[int] = []
    guessed: list[tuple[int, ...]] = []
    for token in (open_, name, is_, 21, 22, 23, age, is_, 14, end):
        guessed.append(seen.worth(9, 0.18)[0])
        output.append(token)
        seen.catch_up(request(prompt, output))
    assert guessed[1][:2] == (name, is_)
    assert guessed[4][:1] == (22,), "a word that was begun"
    assert guessed[7][:1] == (is_,)
    assert guessed[8][:1] not in ((11,), (12,), (13,)), "an age that was another one each time"


def test_catching_up_in_pieces_is_catching_up_at_once() -> None:
    prompt, output = [1, 2, 3, 1, 2], [3, 1, 4, 1, 2, 3]
    at_once, pieces = foresight(prompt, bytearray()), foresight(prompt, bytearray())
    at_once.catch_up(request(prompt, output))
    for count in range(len(output) + 1):
        pieces.catch_up(request(prompt, output[:count]))
    assert at_once.worth(9, 0.01) == pieces.worth(9, 0.01)


def test_prices_cut_guesses() -> None:
    forms = bytearray()
    for _ in range(5):
        forms += ints.pack(list(range(20))) + BORDER
    seen = foresight([0, 1, 2], forms)
    few, most = seen.worth(99, 0.7), seen.worth(99, 0.05)
    assert list(most[0]) == list(range(3, 3 + len(most[0])))
    assert 0 < len(few[0]) < len(most[0])
    assert most[1] > few[1] > 0
    assert seen.worth(2, 0.05)[0] == (3, 4)
    assert seen.worth(0, 0.05) == ((), 0.0)
    assert seen.worth(99, 1.1) == ((), 0.0)


def test_odds_follow_what_happens() -> None:
    odds, case = CaseOdds(), Case(4, 4, 4)
    assert odds.of(case) == pytest.approx(0.8)
    assert odds.of(Case(4, 1, 4)) < odds.of(Case(4, 1, 1)) < odds.of(Case(4, 3, 3)) < odds.of(case)
    assert odds.of(Case(1, 4, 4)) < odds.of(case)
    for _ in range(600):
        odds.count(case, hit=False)
    assert odds.of(case) < 0.05
    for _ in range(600):
        odds.count(case, hit=True)
    assert odds.of(case) > 0.9


def test_habits_are_of_one_namespace_and_one_grammar() -> None:
    habits = Habits()
    habits.add(b"a", SCHEMA, ints.pack([1, 2]))
    assert habits.of(b"a", SCHEMA) == ints.pack([1, 2]) + BORDER
    assert not habits.of(b"b", SCHEMA)
    assert not habits.of(b"a", OTHER)
    assert not habits.of(b"a" * 64, SCHEMA)
    habits.add(b"a" * 64 + b"1", SCHEMA, ints.pack([1]))
    assert not habits.of(b"a" * 64 + b"2", SCHEMA)


def test_habits_are_bounded() -> None:
    habits = Habits()
    held = habits.of(b"", SCHEMA)
    for number in range(40):
        habits.add(b"", SCHEMA, ints.pack([number] * 500))
        assert len(habits.of(b"", SCHEMA)) <= 2 * WINDOW + len(BORDER)
    assert len(held) <= 2 * WINDOW + len(BORDER)
    habits.add(b"", SCHEMA, ints.pack([7] * 100_000))
    assert len(habits.of(b"", SCHEMA)) <= 2 * WINDOW + len(BORDER)
    for number in range(MOST_GRAMMARS + 5):
        habits.of(b"", Constraint("regex", str(number)))
    assert not habits.of(b"", SCHEMA), "the one used least recently"


def test_what_came_while_nobody_looked_is_known_without_being_learnt() -> None:
    forms = bytearray(ints.pack(list(range(300))) + BORDER)
    prompt, output = [0, 1], list(range(2, 250))
    seen = foresight(prompt, forms)
    seen.catch_up(request(prompt, output))
    assert seen.worth(3, 0.05)[0] == (250, 251, 252)
    for count in range(248, 3 * WINDOW // 4, 700):
        seen.catch_up(request(prompt, [*output, *([7] * (count - 248))]))
    assert seen.worth(2, 0.05)[0] == (7, 7)
