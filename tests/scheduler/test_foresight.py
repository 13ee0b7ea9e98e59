"""What is guessed, how sure that is, and what a step costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.foresight import Foresight
from services.scheduler.odds import MEMORY, Odds, Record
from services.scheduler.radix_tree import RadixTree
from services.scheduler.step_cost import StepCost
from shared import ints

texts = st.lists(st.integers(0, 5) | st.sampled_from([256, 65536, 1 << 24]), min_size=1, max_size=60)


def foresight(text: list[int], first: float = 0.5) -> Foresight:
    return Foresight(ints.pack(text), Odds(first), Odds(0.9))


def guesses(source: Foresight, count: int) -> list[int]:
    return ints.unpack(source.guess(count)).tolist()


def longest_context(text: list[int]) -> tuple[int, int] | None:
    """(tokens, place behind them) of the longest end of the text, four tokens at most, that stood before; the last."""
    for length in (4, 3, 2, 1):
        places = [p for p in range(len(text) - length) if text[p : p + length] == text[-length:]]
        if len(text) > length and places:
            return length, places[-1] + length
    return None


@given(texts)
def test_the_guess_is_what_followed_the_last_tokens(text: list[int]) -> None:
    found, source = longest_context(text), foresight(text)
    assert source.guesses == (found is not None)
    if found is not None:
        length, place = found
        assert source.streak == length
        wanted = list(text)
        while len(wanted) < len(text) + 9:
            wanted.append(wanted[place + len(wanted) - len(text)])
        assert guesses(source, 9) == wanted[len(text) :]


@given(texts, texts)
def test_learning_in_pieces_is_learning_at_once(text: list[int], more: list[int]) -> None:
    whole, pieces = foresight(text), foresight(text)
    whole.learn(more)
    for token in more:
        pieces.learn([token])
    assert whole.text() == pieces.text() == ints.pack(text + more)
    assert whole.guesses == pieces.guesses
    assert guesses(whole, 5) == guesses(pieces, 5)
    assert whole.streak == pieces.streak


def test_a_loop_is_guessed_with_growing_confidence() -> None:
    source = foresight([1, 2, 3, 1, 2, 3])
    assert guesses(source, 4) == [1, 2, 3, 1]
    first = source.worth(99, 0.3)
    for _ in range(20):
        source.learn(guesses(source, 1))
    assert source.worth(99, 0.3)[0] > first[0]
    assert source.worth(99, 0.3)[1] > first[1]


def test_a_changed_word_is_passed_over() -> None:
    source = foresight([1, 2, 3, 4, 5, 6, 1, 2])
    source.learn([3, 50])  # 4 was guessed
    assert guesses(source, 2) == [5, 6]
    assert source.streak == 1
    source.learn([60])
    assert not source.guesses, "a second one is no changed word"


def test_what_stood_before_goes_before_what_a_changed_word_hides() -> None:
    source = foresight([7, 8, 9, 0, 1, 2, 3, 7, 5, 1, 2, 3])
    assert guesses(source, 1) == [7]
    source.learn([7])
    source.learn([8])  # 5 was guessed, but 7 8 stood before
    assert guesses(source, 2) == [9, 0]


def test_a_counting_list_costs_one_wrong_guess_a_line() -> None:
    line = [10, 11, 12, 13, 14]
    source = foresight([*line, 100, *line, 101, *line])
    wrong = 0
    for number in range(102, 130):
        for token in (number, *line):
            wrong += guesses(source, 1) != [token]
            source.learn([token])
    assert wrong == 28


def test_a_wrong_guess_is_given_up() -> None:
    source = foresight([1, 2, 9, 1, 2])
    assert guesses(source, 1) == [9]
    source.learn([7])
    assert not source.guesses
    assert source.worth(15, 0.0) == (0, 0.0)


def test_an_answer_of_the_tree_is_followed_to_its_end() -> None:
    source = foresight([1, 2, 3])
    source.follow(ints.pack([7, 8]))
    assert source.worth(15, 0.1)[0] == 2
    assert guesses(source, 2) == [7, 8]
    source.learn([7, 8])
    assert not source.guesses


@pytest.mark.parametrize("behind", range(5))
def test_behind_the_end_of_an_answer_nothing_is_guessed(behind: int) -> None:
    source = foresight([1, 2, 3])
    source.follow(ints.pack([7, 8, 9]))
    count, gain = source.worth(15, 0.0, behind)
    assert count == max(3 - behind, 0)
    assert gain >= 0.0


def test_the_tree_knows_what_came_after() -> None:
    tree = RadixTree(4)
    tree.add_worker("w")
    text = list(range(1, 12))  # two pages and three tokens

    def keep(tokens: list[int], pages: list[int]) -> None:
        lease = tree.acquire(tree.match(b"", ints.pack(tokens)), "w")
        done = lease.num_tokens
        tree.extend(lease, ints.pack(tokens[done:]), pages[done // 4 :])
        tree.release(lease)

    def after(tokens: list[int], limit: int = 99, worker: str = "w", namespace: bytes = b"") -> list[int]:
        return ints.unpack(tree.foresee(namespace, ints.pack(tokens), worker, limit)).tolist()

    keep(text, [0, 1, 2])
    for known in range(1, len(text)):
        assert after(text[:known]) == text[known:]
        assert after(text[:known], limit=2) == text[known : known + 2]
    assert after(text) == []
    assert after([1, 2, 9]) == []
    assert after(text[:5], namespace=b"other") == []
    keep([*text[:6], 50, 51, 52], [0, 3, 4])
    assert after(text[:6]) == [50, 51, 52], "the one used last"
    assert after(text[:7]) == text[7:]
    tree.add_worker("v")
    assert after(text[:5], worker="v") == []


def test_odds_follow_what_happens() -> None:
    odds = Odds(0.5)
    assert odds.of(1) == pytest.approx(0.5)
    assert odds.of(1) < odds.of(2) < odds.of(50)
    for _ in range(4 * MEMORY):
        odds.count(2, hit=False)
    assert odds.of(2) < 0.02
    for _ in range(4 * MEMORY):
        odds.count(2, hit=True)
    assert odds.of(2) > 0.9
    assert odds.worth(2, 0, 0.1, Record()) == (0, 0.0)
    assert odds.worth(2, 5, 1.1, Record()) == (0, 0.0)


def test_a_text_has_a_record_of_its_own() -> None:
    """Texts that miss more often than others are guessed less far, and those that miss less often farther."""
    odds = Odds(0.5)
    bad, good = Record(), Record()

    def chance(record: Record) -> float:
        """Of a guess that is right in 0.7 of all texts."""
        belief, own = record.weights()
        return 1 - belief * 0.3 - own

    assert chance(bad) == pytest.approx(0.7)
    for _ in range(30):
        bad.count(hit=False)
        good.count(hit=True)
    assert chance(bad) < 0.25
    assert chance(good) > 0.9
    assert odds.worth(1, 9, 0.3, bad)[0] < odds.worth(1, 9, 0.3, Record())[0] < odds.worth(1, 9, 0.3, good)[0]
    for _ in range(30):
        bad.count(hit=True)
    assert chance(bad) > 0.7


@given(st.lists(st.booleans(), max_size=50), st.floats(0, 1))
def test_a_record_makes_chances_of_chances(trials: list[bool], chance: float) -> None:
    record = Record()
    for hit in trials:
        record.count(hit=hit)
    belief, own = record.weights()
    assert 0 <= belief * chance + own <= 1 + 1e-9
    assert belief >= 0 <= own


@pytest.mark.parametrize(("fixed", "each"), [(10.0, 0.5), (20.0, 0.0), (1.0, 3.0)])
def test_a_step_costs_a_fixed_part_and_one_for_each_row(fixed: float, each: float) -> None:
    cost = StepCost()
    for rows in [1, 4, 9, 30, 2, 17] * 10:
        cost.observe(rows, fixed + each * rows)
    assert cost.parts() == pytest.approx((fixed, each), abs=1e-6)


def test_steps_of_one_size_say_little_of_a_row() -> None:
    cost = StepCost()
    for _ in range(10):
        cost.observe(1, 18.0)
    fixed, each = cost.parts()
    assert 0 < each < 1.0
    assert fixed + each == pytest.approx(18.0)
