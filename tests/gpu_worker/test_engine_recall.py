"""Rows without tokens: they sample from the state that was kept behind their slot's last token."""

from __future__ import annotations

import random
from pathlib import Path
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
from shared.messages.step import PrefillRow
from tests.gpu_worker.tiny_models import VOCABULARY, load, random_tokens, save_model
from tests.gpu_worker.toy_engine import PAGE, Bench, Steps, floats, greedy, open_slot, prefill, tokens, toy_greedy

CPU = torch.device("cpu")
PROMPT = [5, 17, 3, 88, 41, 9, 60]


def keep(slot: int, ids: list[int], sample: bool = True) -> PrefillRow:
    return PrefillRow(slot, pack(ids), sample, keep_hidden=True)


def recall(slot: int) -> PrefillRow:
    return PrefillRow(slot, b"")


def test_what_was_kept_is_sampled_from_again() -> None:
    bench = Bench(keeps_hidden=True)
    first = tokens(bench.step(opens=(open_slot(0, 7, [0, 1, 2, 3]),), prefills=(keep(0, PROMPT),)))
    opened = open_slot(1, 7, [0, 5, 6, 7], computed=7)
    again = tokens(bench.step([0], opens=(opened,), page_copies=pack([1, 5]), prefills=(recall(1),)))
    assert again == [toy_greedy(PROMPT, 2)[1], first[0]]
    for _ in range(4):
        again += tokens(bench.step([1]))
    assert again[1:] == toy_greedy(PROMPT, 5)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_recalled_rows_among_all_others(seed: int) -> None:
    """Each slot begins with what is known of its prompt, keeps or recalls as it can; steps mix rows of all kinds."""
    draw = random.Random(seed)
    bench = Bench(slots=6, pages=64, context=40, keeps_hidden=True, drafts=3)
    known: dict[tuple[int, ...], int] = {}  # prompt -> its last page
    out: dict[int, tuple[list[int], list[int]]] = {}
    for step in range(14):
        opens, rows, copies, decode = [], [], [], []
        order: list[int] = []
        for slot in range(6):
            if slot in out:
                if draw.random() < 0.7:
                    decode.append(slot)
            elif draw.random() < 0.5:
                prompt = [draw.randrange(3) for _ in range(draw.choice([1, 2, 4]))]
                pages = list(range(10 * slot, 10 * slot + 10))
                page = known.get(tuple(prompt))
                computed = 0 if page is None or page // 10 == slot else len(prompt)
                if computed:
                    copies += [page, pages[0]]
                opens.append(open_slot(slot, len(prompt), pages, computed=computed))
                rows.append(recall(slot) if computed else draw.choice([keep, prefill])(slot, prompt))
                out[slot] = (prompt, [])
                order.append(slot)
        pairs = list(zip(rows, order, strict=True))
        draw.shuffle(pairs)
        rows, order = [row for row, _ in pairs], [slot for _, slot in pairs]
        result = tokens(bench.step(decode, opens=tuple(opens), page_copies=pack(copies), prefills=tuple(rows)))
        for slot, token in zip([*decode, *order], result, strict=True):
            out[slot][1].append(token)
        for row, slot in pairs:
            if row.keep_hidden:
                known[tuple(out[slot][0])] = 10 * slot
        if step == 8:
            known = {prompt: page for prompt, page in known.items() if page // 10 > 2}
            bench.step(closes=pack([slot for slot in out if slot < 3]))
            out = {slot: seen for slot, seen in out.items() if slot >= 3}
    for prompt, seen in out.values():
        assert seen == toy_greedy(prompt, len(seen))


def test_a_state_is_kept_of_rows_that_sample_nothing() -> None:
    """Their pages are shared, so what is kept with them must be theirs, not what was there before."""
    bench = Bench(keeps_hidden=True)
    bench.step(opens=(open_slot(0, 3, [0]),), prefills=(keep(0, [1, 2, 3]),))
    bad = SamplingParams(temperature=float("nan"))
    rows = (keep(1, [5, 17, 3]), keep(2, [8, 8, 8], sample=False))
    bench.step(closes=pack([0]), opens=(open_slot(1, 3, [0], bad), open_slot(2, 3, [1])), prefills=rows)
    opens = (open_slot(3, 3, [4], computed=3), open_slot(4, 3, [5], computed=3))
    result = bench.step(opens=opens, page_copies=pack([0, 4, 1, 5]), prefills=(recall(3), recall(4)))
    assert tokens(result) == [*toy_greedy([5, 17, 3], 1), *toy_greedy([8, 8, 8], 1)]


def test_a_state_that_is_not_finite_ends_its_rows() -> None:
    bench = Bench(keeps_hidden=True)
    bench.runner.broken_tokens = {60}
    bench.step(opens=(open_slot(0, 7, [0, 1]),), prefills=(keep(0, PROMPT),))
    result = bench.step(opens=(open_slot(1, 7, [0, 2], computed=7),), page_copies=pack([1, 2]), prefills=(recall(1),))
    assert tokens(result) == [-1]
    assert [error.slot for error in result.errors] == [1]


@pytest.mark.parametrize(
    "row",
    [
        PrefillRow(0, b"", sample=False),
        PrefillRow(0, b"", keep_hidden=True),
        PrefillRow(0, b"", drafts=1),
        PrefillRow(0, b"", score_from=0),
        PrefillRow(0, b"", next_token=4),
        PrefillRow(0, pack([4, 5]), keep_hidden=True, drafts=1),
        PrefillRow(5, b""),
    ],
)
def test_rows_that_cannot_be(row: PrefillRow) -> None:
    bench = Bench(keeps_hidden=True, drafts=3)
    bench.step(opens=(open_slot(0, 3, [0, 1]),), prefills=(keep(0, [1, 2, 3]),))
    with pytest.raises(ProtocolError):
        bench.step(prefills=(row,))


@pytest.mark.parametrize("row", [keep(0, [4]), recall(0)])
def test_who_keeps_nothing_says_so(row: PrefillRow) -> None:
    bench = Bench()
    bench.step(opens=(open_slot(0, 3, [0, 1]),), prefills=(prefill(0, [1, 2, 3]),))
    with pytest.raises(ProtocolError, match="hidden"):
        bench.step(prefills=(row,))


def test_nothing_is_recalled_of_no_tokens() -> None:
    bench = Bench(keeps_hidden=True)
    with pytest.raises(ProtocolError, match="none before"):
        bench.step(opens=(open_slot(0, 3, [0]),), prefills=(recall(0),))


# A real decoder: bit by bit what computing the token again gives.


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_model(request.param, folder)
    return folder


def steps_of(folder: Path, **options: Any) -> Steps:
    runner = load(folder, attention_backend="native", **options).build_runner(64, PAGE, 128)
    assert runner.kv_cache.hidden is not None
    limits = SlotLimits(8, 64, PAGE, 200, VOCABULARY, 3, keeps_hidden=True)
    return Steps(Engine(runner, limits, 128, CPU))


SCORED = SamplingParams(temperature=0.0, logprobs=5)
DRAWN = SamplingParams(temperature=0.9, seed=11, logprobs=5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("params", [SCORED, DRAWN, greedy(repetition_penalty=1.2, logprobs=5)])
@pytest.mark.parametrize("length", [3, PAGE, 21])
def test_recalled_logits_are_the_computed_ones(
    folder: Path, dtype: torch.dtype, params: SamplingParams, length: int
) -> None:
    prompt, other = random_tokens(length, 1), random_tokens(9, 2)
    pages = -(-length // PAGE)

    def begin(driver: Steps) -> None:
        opened = (open_slot(0, length, list(range(pages))), open_slot(1, 9, [30, 31, 32, 33]))
        driver.step(opens=opened, prefills=(keep(0, prompt), prefill(1, other)))

    def again(driver: Steps, computed: int, row: PrefillRow) -> Any:
        table = [*range(pages - 1), 40, 41, 42] if length % PAGE else [*range(pages), 41, 42]
        copies = pack([pages - 1, 40]) if length % PAGE else b""
        opened = open_slot(2, length, table, params, computed=computed, history=prompt[:computed])
        return driver.step([1], opens=(opened,), page_copies=copies, prefills=(row,))

    recalling, computing = steps_of(folder, dtype=dtype), steps_of(folder, dtype=dtype)
    begin(recalling)
    begin(computing)
    found = again(recalling, length, recall(2))
    wanted = again(computing, length - 1, prefill(2, prompt[-1:]))
    for _ in range(5):
        assert tokens(found) == tokens(wanted)
        assert _floats_of(found) == _floats_of(wanted)
        found, wanted = recalling.step([1, 2]), computing.step([1, 2])


def _floats_of(result: Any) -> list[list[float]]:
    return [floats(part) for row in result.scores for part in (row.scores.logprobs, row.scores.top_logprobs)]


def test_a_step_of_recalled_rows_alone(folder: Path) -> None:
    driver = steps_of(folder)
    prompt = random_tokens(6, 1)
    first = tokens(driver.step(opens=(open_slot(0, 6, [0, 1, 2]),), prefills=(keep(0, prompt),)))
    opens = tuple(open_slot(slot, 6, [0, slot + 10, slot + 20], computed=6) for slot in (1, 2))
    rows = (recall(1), recall(2))
    assert tokens(driver.step(opens=opens, page_copies=pack([1, 11, 1, 12]), prefills=rows)) == first * 2
    following = [tokens(driver.step([0, 1, 2])) for _ in range(4)]
    assert all(len(set(row)) == 1 for row in following)


def test_large_fp32_steps_by_plain_weights_recall_within_rounding(folder: Path) -> None:
    """There sums depend on the number of rows anyway; a recalled row must still be the right one."""
    driver = steps_of(folder, dtype=torch.float32)
    prompt, long = random_tokens(6, 1), random_tokens(60, 2)
    first = driver.step(opens=(open_slot(0, 6, [0, 1], SCORED),), prefills=(keep(0, prompt),))
    opens = (open_slot(1, 6, [0, 11], SCORED, computed=6), open_slot(2, 60, list(range(20, 36)), SCORED))
    scored = PrefillRow(2, pack(long), score_from=0)
    result = driver.step(opens=opens, page_copies=pack([1, 11]), prefills=(scored, recall(1)))
    assert tokens(result)[1] == tokens(first)[0]
    np.testing.assert_allclose(
        floats(result.scores[1].scores.logprobs), floats(first.scores[0].scores.logprobs), atol=1e-4
    )
    assert result.prompt_scores[0].scores.count == 60


@pytest.mark.parametrize("guesses", [0, 2])
def test_recalled_rows_beside_rows_that_share_pages(folder: Path, guesses: int) -> None:
    """Of groups of rows with and without guesses, while others compute nothing."""
    driver = steps_of(folder)
    prompt = random_tokens(9, 1)
    first = tokens(driver.step(opens=(open_slot(0, 9, [0, 1, 2, 3]),), prefills=(keep(0, prompt),)))
    opens = tuple(open_slot(slot, 9, [0, 1, slot + 10, slot + 20], computed=9) for slot in (1, 2, 3))
    rows = (recall(1), recall(2))
    copies = pack([2, 11, 2, 12, 2, 13])
    assert tokens(driver.step(opens=opens[:2], page_copies=copies[:16], prefills=rows)) == first * 2
    alone = [tokens(driver.step([0])) for _ in range(3)]
    guessed = [token for [token] in alone[:guesses]]
    groups = {"group_slots": pack([1, 2]), "group_sizes": pack([2]), "group_pages": pack([2])}
    drafts = tuple(prefill(slot, [*first, *guessed], drafts=guesses) for slot in (1, 2)) if guesses else ()
    decode = [] if guesses else [1, 2]
    mixed = (drafts[0], recall(3), drafts[1]) if guesses else (recall(3),)
    result = tokens(driver.step(decode, opens=opens[2:], page_copies=copies[16:], prefills=mixed, **groups))
    answer = [token for [token] in alone[: guesses + 1]]
    assert result == ([*answer, *first, *answer] if guesses else [*answer, *answer, *first])
