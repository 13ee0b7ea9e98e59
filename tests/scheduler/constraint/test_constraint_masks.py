"""The mask filler: every row answered, failures alone, forced tokens; and the state behind it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.scheduler.constraint.completion import allowed
from services.scheduler.constraint.masks import MaskFiller, RowJob
from services.scheduler.constraint.state import ConstraintState

sys.path.insert(0, str(Path(__file__).parent))
from constraint_kit import build, mask, vocabulary

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


class BrokenMatcher:
    """Works until its mask is asked for."""

    error = ""
    is_complete = False
    is_stopped = False

    def advance(self, ids: Sequence[int]) -> bool:
        return True

    def count_valid(self, ids: Sequence[int]) -> int:
        return 0

    def completes(self, ids: Sequence[int]) -> bool:
        return False

    def forced_tokens(self) -> list[int]:
        return []

    def fill_mask(self, row: Any) -> bool:
        raise RuntimeError("out of fuel")

    def fork(self) -> BrokenMatcher:
        return self


@pytest.fixture
def filler() -> Iterator[MaskFiller]:
    filler = MaskFiller(vocabulary().words, threads=2)
    yield filler
    filler.close()


def _ids(row: Any) -> set[int]:
    return set(allowed(row, vocabulary()).tolist())


def test_rows_come_in_order_and_equal_the_matchers_own_masks(filler: MaskFiller) -> None:
    sources = ["[ab]+", "[0-9]{3}", "(x|yy)z", "中+"] * 12
    states = [ConstraintState(build("regex", source), jump_forward=False) for source in sources]
    filled = filler.submit([RowJob(state) for state in states]).result()
    assert filled.bitmask.shape == (48, vocabulary().words)
    assert len(filled.data) == filled.bitmask.nbytes
    for source, row, outcome in zip(sources, filled.bitmask, filled.outcomes, strict=True):
        assert not outcome.error
        assert _ids(row) == set(mask(build("regex", source)).tolist())


def test_accepted_tokens_are_taken_first(filler: MaskFiller) -> None:
    state = ConstraintState(build("regex", "ab[cd]"))
    outcome = filler.submit([RowJob(state, tuple(vocabulary().encode("ab")))]).result()
    starts = {vocabulary().all_bytes[token] for token in _ids(outcome.bitmask[0])}
    assert starts == {b"c", b"d"}


def test_a_failing_row_is_all_ones_and_fails_alone(filler: MaskFiller) -> None:
    good = ConstraintState(build("regex", "[0-9]"))
    wrong = ConstraintState(build("regex", "[0-9]"))
    jobs = [
        RowJob(good),
        RowJob(None),
        RowJob(wrong, tuple(vocabulary().encode("x"))),
        RowJob(ConstraintState(BrokenMatcher())),
        RowJob(ConstraintState(build("regex", "a"))),
    ]
    filled = filler.submit(jobs).result()
    assert [bool(outcome.error) for outcome in filled.outcomes] == [False, False, True, True, False]
    assert "out of fuel" in filled.outcomes[3].error
    for index in (1, 2, 3):
        assert (filled.bitmask[index] == -1).all()
    assert len(_ids(filled.bitmask[0])) == 10
    again = filler.submit([RowJob(wrong)]).result()
    assert again.outcomes[0].error
    assert (again.bitmask == -1).all()


def test_forced_tokens_leave_one_bit_and_are_cut_to_the_budget(filler: MaskFiller) -> None:
    def filled(budget: int, *, jump: bool = True) -> Any:
        state = ConstraintState(build("choice", '["a long and only choice"]'), jump_forward=jump)
        return filler.submit([RowJob(state, budget=budget)]).result()

    whole = vocabulary().encode("a long and only choice")
    long = filled(50)
    assert list(long.outcomes[0].forced) == whole[: len(long.outcomes[0].forced)]
    assert len(long.outcomes[0].forced) > 2
    assert _ids(long.bitmask[0]) == {whole[0]}
    assert filled(2).outcomes[0].forced == tuple(whole[:2])
    off = filled(50, jump=False)
    assert off.outcomes[0].forced == ()
    assert whole[0] in _ids(off.bitmask[0])


def test_the_end_is_reported(filler: MaskFiller) -> None:
    state = ConstraintState(build("regex", "ab"))
    end = filler.submit([RowJob(state, tuple(vocabulary().encode("ab")))]).result()
    assert end.outcomes[0].stopped
    assert _ids(end.bitmask[0]) == set(vocabulary().eos_ids)
    open_end = ConstraintState(build("regex", "ab*"))
    more = filler.submit([RowJob(open_end, tuple(vocabulary().encode("ab")))]).result()
    assert not more.outcomes[0].stopped
    assert set(vocabulary().eos_ids) < _ids(more.bitmask[0])


def _of_each_step(job: RowJob, tokens: tuple[int, ...]) -> list[set[int]]:
    """The masks before each of `tokens` and behind the last one, filled one after the other."""
    assert job.state is not None
    state, found = job.state.fork(), []
    row = np.empty(vocabulary().words, np.int32)
    for index, token in enumerate((*tokens, -1)):
        state.fill(row, job.budget - index)
        found.append(_ids(row))
        if token >= 0:
            assert state.advance((token,))
    return found


@pytest.mark.parametrize("jump", [False, True])
def test_masks_behind_guesses_are_those_of_the_steps_to_come(filler: MaskFiller, jump: bool) -> None:
    for source, text in (("[ab]{5,9}", "abba"), ("(one|two) and more", "two and"), ("[0-9]{2}-x+", "12-x")):
        guesses = tuple(vocabulary().encode(text))
        state = ConstraintState(build("regex", source), jump_forward=jump)
        job = RowJob(state, budget=40, guesses=guesses)
        wanted = _of_each_step(job, guesses)
        neighbour = RowJob(ConstraintState(build("regex", "[0-9]")))
        filled = filler.submit([neighbour, job, RowJob(None, guesses=(1, 2)), neighbour]).result()
        assert [len(_ids(row)) for row in (filled.bitmask[0], filled.bitmask[-1])] == [10, 10]
        assert [_ids(row) for row in filled.bitmask[1 : 2 + len(guesses)]] == wanted
        assert (filled.bitmask[2 + len(guesses) : -1] == -1).all()
        assert filled.outcomes[1].useful > len(guesses)
        assert len(filled.outcomes[1].ahead) == len(guesses)
        assert state.advance(guesses), "the state itself has not moved"


def test_behind_a_guess_that_is_not_allowed_anything_may_be_sampled(filler: MaskFiller) -> None:
    [a], [x] = vocabulary().encode("a"), vocabulary().encode("x")
    state = ConstraintState(build("regex", "[ab]{5}"))
    filled = filler.submit([RowJob(state, guesses=(a, x, a))]).result()
    assert not filled.outcomes[0].error
    assert x not in _ids(filled.bitmask[1])
    assert (filled.bitmask[2:] == -1).all()


def test_a_guess_that_completes_the_text_is_the_last_that_counts(filler: MaskFiller) -> None:
    [a] = vocabulary().encode("a")
    for length in (1, 2, 3):
        state = ConstraintState(build("regex", f"[ab]{{{length}}}"))
        filled = filler.submit([RowJob(state, guesses=(a, a, a))]).result()
        assert filled.outcomes[0].useful == length
        assert not filled.outcomes[0].cut
        assert len(filled.outcomes[0].ahead) == length - 1
        assert not filled.outcomes[0].stopped


def test_wider_rows_allow_nothing_beyond_the_vocabulary() -> None:
    filler = MaskFiller(vocabulary().words + 3)
    filled = filler.submit([RowJob(ConstraintState(build("regex", "[ab]+")))]).result()
    assert (filled.bitmask[0, vocabulary().words :] == 0).all()
    filler.close()


def test_many_jobs_at_once_are_all_answered(filler: MaskFiller) -> None:
    base = build("json_schema", PERSON)
    futures = [filler.submit([RowJob(ConstraintState(base.fork())) for _ in range(17)]) for _ in range(20)]
    for future in futures:
        assert not any(outcome.error for outcome in future.result().outcomes)


def test_a_slow_row_holds_up_only_its_kind(filler: MaskFiller) -> None:
    """While one that never ends is filled, all others are."""
    gate = threading.Event()

    class Endless(BrokenMatcher):
        def fill_mask(self, row: Any) -> bool:
            gate.wait()
            return True

    slow = filler.prepare(RowJob(ConstraintState(Endless())))
    for _ in range(4):
        assert not filler.submit([RowJob(ConstraintState(build("regex", "[0-9]")))]).result().outcomes[0].error
    assert not slow.done()
    gate.set()
    assert not slow.result().outcomes[0].error


def test_no_job_is_an_empty_answer(filler: MaskFiller) -> None:
    assert filler.submit([]).result().outcomes == ()


@pytest.mark.parametrize(
    ("kind", "source", "text"),
    [
        ("json_schema", PERSON, '{"name":"李雷 😀","age":42}'),
        ("json_schema", PERSON, '{"name":"Ada Lovelace","age":7}'),
        ("regex", r"The answer is (yes|no), because [a-z ]+\.", "The answer is yes, because it is so."),
        ("choice", '["green apple tree","red pear","中文字"]', "red pear"),
    ],
)
def test_jumping_ahead_gives_the_same_tokens_as_not(kind: str, source: str, text: str) -> None:
    """Following one text with and without jumps: the ids are one consistent tokenisation, the tokenizer's own."""
    expected = vocabulary().encode(text)
    jumped = 0
    state = ConstraintState(build(kind, source))
    row = np.zeros(vocabulary().words, np.int32)
    out: list[int] = []
    while len(out) < len(expected):
        forced = state.fill(row, 100)
        jumped += len(forced)
        ids = forced or (expected[len(out)],)
        assert ids[0] in _ids(row)
        assert state.advance(ids)
        out += ids
    assert out == expected
    assert state.is_complete
    plain = ConstraintState(build(kind, source), jump_forward=False)
    for token in expected:
        assert plain.fill(row, 100) == ()
        assert token in _ids(row)
        assert plain.advance([token])
    assert plain.is_complete
    assert jumped


def test_a_state_begins_after_the_thinking_part() -> None:
    end = vocabulary().encode("\n")[0]
    state = ConstraintState(build("regex", "[0-9]"), thinking_end=end, ends=vocabulary().eos_ids)
    row = np.zeros(vocabulary().words, np.int32)
    assert state.fill(row, 10) == ()
    assert _ids(row) == set(range(vocabulary().size)) - set(vocabulary().eos_ids)
    assert not state.begun
    assert state.advance(vocabulary().encode("anything at all"))
    assert not state.is_complete
    child = state.fork()
    assert state.advance([*vocabulary().encode("x"), end, *vocabulary().encode("7")])
    assert state.begun
    assert state.is_stopped
    assert not child.begun


def test_replaying_ids_equals_having_followed_them() -> None:
    ids = vocabulary().encode('{"name":"Ada')
    followed, replayed = (ConstraintState(build("json_schema", PERSON)) for _ in range(2))
    for token in ids:
        assert followed.advance([token])
    assert replayed.advance(ids)
    rows = np.zeros((2, vocabulary().words), np.int32)
    followed.fill(rows[0], 50)
    replayed.fill(rows[1], 50)
    assert (rows[0] == rows[1]).all()
