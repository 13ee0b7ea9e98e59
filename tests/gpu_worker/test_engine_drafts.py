"""Rows that end in guesses: as many tokens as are right, and the slot as if it had decoded these one by one."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.engine import Engine
from services.gpu_worker.faults import ProtocolError
from services.gpu_worker.slots import SlotLimits
from shared.ints import pack
from shared.messages.request import SamplingParams
from shared.messages.step import StepResult
from tests.gpu_worker.toy_engine import (
    PAGE,
    VOCAB,
    Steps,
    ToyRunner,
    greedy,
    open_slot,
    prefill,
    tokens,
    toy_greedy,
)

PROMPT = [5, 17, 3, 88, 41, 9, 60]
DRAFTS = 6
ANSWER = toy_greedy(PROMPT, 24)


class DraftBench(Steps):
    engine: Engine

    def __init__(self, slots: int = 4) -> None:
        self.runner = ToyRunner(64)
        limits = SlotLimits(slots, 64, PAGE, 64, VOCAB, DRAFTS)
        super().__init__(Engine(self.runner, limits, 64, torch.device("cpu")))

    def begin(self, slot: int = 0, params: SamplingParams | None = None, remaining: int = 1000) -> int:
        """Prefill the prompt; returns the first token."""
        pages = list(range(12 * slot, 12 * slot + 12))
        opened = open_slot(slot, len(PROMPT), pages, params or greedy(), remaining=remaining)
        [first] = tokens(self.step(opens=(opened,), prefills=(prefill(slot, PROMPT),)))
        return first

    def guess(self, last: int, guesses: list[int], slot: int = 0, **fields: Any) -> StepResult:
        row = prefill(slot, [last, *guesses], drafts=len(guesses))
        return self.step(prefills=(row,), **fields)


@pytest.mark.parametrize("right", range(DRAFTS + 1))
def test_right_guesses_count_and_wrong_ones_leave_nothing(right: int) -> None:
    bench = DraftBench()
    first = bench.begin()
    guesses = ANSWER[1 : 1 + right] + [(t + 1) % VOCAB for t in ANSWER[1 + right : 1 + DRAFTS]]
    result = tokens(bench.guess(first, guesses))
    assert result == ANSWER[1 : 2 + right] + [-1] * (DRAFTS - right)
    out = [first, *result[: right + 1]]
    while len(out) < 16:
        out += tokens(bench.step([0]))
    assert out == ANSWER[:16]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 0.9]), filtered=st.booleans())
def test_any_guesses_lead_to_the_same_answers(seed: int, temperature: float, filtered: bool) -> None:
    draw = random.Random(seed)
    params = SamplingParams(temperature=temperature, seed=seed, top_k=7 if filtered else -1)
    plain = DraftBench()
    wanted = [plain.begin(params=params)]
    for _ in range(23):
        wanted += tokens(plain.step([0]))
    bench = DraftBench()
    out = {slot: [bench.begin(slot, params)] for slot in range(3)}
    while any(len(seen) < 16 for seen in out.values()):
        rows, kinds = [], {slot: draw.randint(0, DRAFTS) for slot in out}
        for slot, count in kinds.items():
            if count:
                done = len(out[slot])
                row = [t if draw.random() < 0.8 else draw.randrange(VOCAB) for t in wanted[done : done + count]]
                row += [0] * (count - len(row))
                rows.append(prefill(slot, [out[slot][-1], *row], drafts=count))
        decode = [slot for slot, count in kinds.items() if not count]
        result = tokens(bench.step(decode, prefills=tuple(rows)))
        for slot in decode:
            out[slot].append(result.pop(0))
        for row in rows:
            drawn, result = result[: row.drafts + 1], result[row.drafts + 1 :]
            out[row.slot] += [token for token in drawn if token >= 0]
    for seen in out.values():
        assert seen[:16] == wanted[:16]


def test_an_answer_ends_within_guesses() -> None:
    bench = DraftBench()
    first = bench.begin(params=greedy(stop_token_ids=(ANSWER[3],)))
    assert tokens(bench.guess(first, ANSWER[1:6])) == [*ANSWER[1:4], -1, -1, -1]
    assert tokens(bench.step([0])) == [-1]


def test_a_stop_token_that_comes_too_early_is_none() -> None:
    bench = DraftBench()
    params = greedy(stop_token_ids=(ANSWER[2], 99), min_new_tokens=9)
    first = bench.begin(params=params)
    plain = DraftBench()
    alone = [plain.begin(params=params)]
    for _ in range(8):
        alone += tokens(plain.step([0]))
    assert tokens(bench.guess(first, alone[1:6])) == alone[1:7]


def test_no_more_tokens_than_remain() -> None:
    bench = DraftBench()
    first = bench.begin(remaining=4)
    assert tokens(bench.guess(first, ANSWER[1:7])) == [*ANSWER[1:4], -1, -1, -1, -1]
    assert tokens(bench.step([0])) == [-1]


def test_logits_that_are_not_finite_end_the_request_only_where_they_count() -> None:
    for right, fails in ((0, False), (3, True)):
        bench = DraftBench()
        first = bench.begin()
        bench.runner.broken_tokens = {ANSWER[2]}
        guesses = ANSWER[1 : 1 + right] + [(t + 1) % VOCAB for t in ANSWER[1 + right : 5]]
        result = bench.guess(first, guesses)
        assert bool(result.errors) is fails
        assert tokens(result)[0] == ANSWER[1]


def test_other_rows_are_not_disturbed() -> None:
    bench = DraftBench()
    first = bench.begin(0)
    bench.begin(1)
    result = tokens(bench.step([1], prefills=(prefill(0, [first, 1, 2, 3], drafts=3),)))
    assert result[0] == ANSWER[1]
    assert len(result) == 5
    assert bench.engine.slots.computed[:2].tolist() == [len(PROMPT) + 1] * 2
    assert bench.engine.slots.remaining[:2].tolist() == [998] * 2


@pytest.mark.parametrize(
    ("row", "params"),
    [
        ({"drafts": DRAFTS + 1}, {}),
        ({"drafts": -1}, {}),
        ({"drafts": 8}, {}),
        ({"drafts": 2, "sample": False}, {}),
        ({"drafts": 2, "score_from": 0}, {}),
        ({"drafts": 2, "next_token": 4}, {}),
        ({"drafts": 2}, {"logprobs": 0}),
        ({"drafts": 2}, {"presence_penalty": 0.5}),
    ],
)
def test_what_no_scheduler_sends_is_refused(row: dict[str, int], params: dict[str, float]) -> None:
    bench = DraftBench()
    bench.begin(params=greedy(**params))
    with pytest.raises(ProtocolError):
        bench.step(prefills=(prefill(0, list(range(8)), **row),))


def masks_for(allowed: list[list[int]]) -> bytes:
    """One row of a bitmask for each list of tokens; an empty one allows all."""
    words = np.zeros((len(allowed), -(-VOCAB // 32)), "<u4")
    for row, some in zip(words, allowed, strict=True):
        row[:] = 0 if some else 0xFFFFFFFF
        for token in some:
            row[token // 32] |= np.uint32(1 << token % 32)
    return words.tobytes()


@pytest.mark.parametrize("masked", [[0], [0, 0], [0, 0, 0, 0], [0, 0, 1]])
def test_a_masked_row_has_a_mask_for_each_sample(masked: list[int]) -> None:
    bench = DraftBench()
    first = bench.begin()
    bench.masks[1] = (pack(masked), masks_for([[]] * len(masked)))
    with pytest.raises(ProtocolError):
        bench.guess(first, [1, 2], masked_slots=pack(masked))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), temperature=st.sampled_from([0.0, 0.9]))
def test_guesses_under_masks_lead_to_the_same_answers(seed: int, temperature: float) -> None:
    """A mask belongs to its position, whether the token there is guessed or not."""
    draw = random.Random(seed)
    params = SamplingParams(temperature=temperature, seed=seed)
    allowed = [draw.sample(range(VOCAB), 9) if draw.random() < 0.7 else [] for _ in range(30)]
    plain = DraftBench()
    wanted = [plain.begin(params=params)]
    for position in range(1, 24):
        plain.masks[position] = (pack([0]), masks_for([allowed[position]]))
        wanted += tokens(plain.step([0], masked_slots=pack([0])))
    bench = DraftBench()
    out = [bench.begin(params=params)]
    for step in range(1, 24):
        if len(out) >= 24:
            break
        count = draw.randint(1, min(DRAFTS, 24 - len(out)))
        right = draw.randint(0, count)
        guesses = [*wanted[len(out) : len(out) + right], *(draw.randrange(VOCAB) for _ in range(count - right))]
        slots = pack([0] * (1 + count))
        bench.masks[step] = (slots, masks_for(allowed[len(out) : len(out) + count + 1]))
        out += [token for token in tokens(bench.guess(out[-1], guesses[:count], masked_slots=slots)) if token >= 0]
    assert out[:24] == wanted


def test_masks_of_a_row_that_has_ended_are_owed_too() -> None:
    bench = DraftBench()
    first = bench.begin(remaining=1)
    bench.masks[1] = (pack([0, 0]), masks_for([[], []]))
    assert tokens(bench.guess(first, [1], masked_slots=pack([0, 0]))) == [-1, -1]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_rows_with_guesses_are_grouped_as_rows_of_one_token(data: st.DataObject) -> None:
    """What the attention is given: the same tokens and what each of them sees, one row for each grouped one."""
    bench, count = DraftBench(slots=4), 4
    for slot in range(count):
        opened = open_slot(slot, 9, [40, 41, 12 * slot, 12 * slot + 1, 12 * slot + 2, 12 * slot + 3], computed=0)
        bench.step(opens=(opened,), prefills=(prefill(slot, [*PROMPT, 1, slot]),))
    guesses = {slot: data.draw(st.integers(0, DRAFTS)) for slot in range(count)}
    members = data.draw(st.lists(st.sampled_from(range(count)), min_size=2, unique=True))
    rows = tuple(prefill(slot, [7, *range(n)], drafts=n) for slot, n in guesses.items() if n)
    decode = [slot for slot, n in guesses.items() if not n]
    bench.step(
        decode, prefills=rows, group_slots=pack(members), group_sizes=pack([len(members)]), group_pages=pack([2])
    )
    batch = bench.runner.batches[-1]
    order = [*((slot, 1) for slot in decode), *((row.slot, row.drafts + 1) for row in rows)]
    indptr, lengths = batch.qo_indptr.tolist(), batch.kv_lengths.tolist()
    expected, grouped = [], []
    for slot, size in order:
        pieces = [(1, 9 + i + 1) for i in range(size)] if slot in members else [(size, 9 + size)]
        grouped += range(len(expected), len(expected) + len(pieces)) if slot in members else []
        expected += [(n, end, slot) for n, end in pieces]
    assert [b - a for a, b in itertools.pairwise(indptr)] == [n for n, _, _ in expected]
    assert lengths == [end for _, end, _ in expected]
    assert [row[2].item() for row in batch.page_tables] == [12 * slot for _, _, slot in expected]
    assert [sorted(group.rows.tolist()) for group in batch.groups] == [grouped]


# Rows that were planned before the result of the step before was there.


@pytest.mark.parametrize("right", range(4))
def test_a_row_ahead_is_a_decode_row_where_its_expectation_fails(right: int) -> None:
    bench = DraftBench()
    first = bench.begin()
    guesses = ANSWER[1 : 1 + right] + [(t + 1) % VOCAB for t in ANSWER[1 + right : 4]]
    out = [first, *(t for t in tokens(bench.guess(first, guesses)) if t >= 0)]
    assert out == ANSWER[: 2 + right]
    row = prefill(0, ANSWER[4:7], drafts=2, start=len(PROMPT) + 4)
    result = tokens(bench.step(prefills=(row,)))
    wanted = ANSWER[5:8] if right == 3 else [ANSWER[2 + right], -1, -1]
    assert result == wanted
    out += [t for t in result if t >= 0]
    while len(out) < 16:
        out += tokens(bench.step([0]))
    assert out == ANSWER[:16]


@pytest.mark.parametrize(("expected", "start"), [(ANSWER[1] + 1, 8), (ANSWER[1], 7), (ANSWER[1], 9)])
def test_another_token_or_place_is_no_expectation_come_true(expected: int, start: int) -> None:
    bench = DraftBench()
    bench.begin()
    assert tokens(bench.step([0])) == [ANSWER[1]]
    row = prefill(0, [expected % VOCAB, *ANSWER[2:4]], drafts=2, start=start)
    assert tokens(bench.step(prefills=(row,))) == [ANSWER[2], -1, -1]
    assert tokens(bench.step([0])) == [ANSWER[3]]


def test_a_row_ahead_of_a_slot_that_has_ended_is_none() -> None:
    bench = DraftBench()
    first = bench.begin(params=greedy(stop_token_ids=(ANSWER[2],)))
    other = bench.begin(1)
    assert tokens(bench.guess(first, ANSWER[1:4], decode=[1])) == [ANSWER[1], *ANSWER[1:3], -1, -1]
    row = prefill(0, ANSWER[4:6], drafts=1, start=len(PROMPT) + 4)
    assert tokens(bench.step([1], prefills=(row,))) == [ANSWER[2], -1, -1]
    assert other == first


def test_rows_ahead_share_pages_whether_they_come_true_or_not() -> None:
    """A group may name rows of both kinds."""
    bench = DraftBench()
    for slot in range(3):
        pages = [0, *range(12 * slot + 1, 12 * slot + 12)]
        computed = 4 if slot else 0
        opened = open_slot(slot, len(PROMPT), pages, computed=computed)
        bench.step(opens=(opened,), prefills=(prefill(slot, PROMPT[computed:]),))
    rows = (
        prefill(1, [ANSWER[0], *ANSWER[1:3]], drafts=2, start=len(PROMPT)),
        prefill(2, [ANSWER[0] + 1, *ANSWER[1:3]], drafts=2, start=len(PROMPT)),
    )
    groups = {"group_slots": pack([0, 1, 2]), "group_sizes": pack([3]), "group_pages": pack([1])}
    assert tokens(bench.step([0], prefills=rows, **groups)) == [ANSWER[1], *ANSWER[1:4], ANSWER[1], -1, -1]


@pytest.mark.parametrize(
    "row",
    [
        {"ids": ANSWER[1:4], "drafts": 1, "start": 8},
        {"ids": ANSWER[1:3], "drafts": 1, "start": 8, "sample": False},
        {"ids": ANSWER[1:3], "drafts": 1, "start": 8, "score_from": 3},
    ],
)
def test_rows_that_cannot_be_ahead(row: dict[str, Any]) -> None:
    bench = DraftBench()
    bench.begin()
    with pytest.raises(ProtocolError):
        bench.step(prefills=(prefill(0, **row),))


def test_nothing_is_expected_of_a_slot_that_has_sampled_nothing() -> None:
    bench = DraftBench()
    bench.step(opens=(open_slot(0, 9, list(range(12))),), prefills=(prefill(0, PROMPT, sample=False),))
    with pytest.raises(ProtocolError, match="nothing yet"):
        bench.step(prefills=(prefill(0, ANSWER[:2], drafts=1, start=7),))
