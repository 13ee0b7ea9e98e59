"""The engine over the toy model: every token depends on every earlier one through the pages."""

from __future__ import annotations

import numpy as np
import pytest

from services.gpu_worker.faults import ProtocolError
from shared.ints import pack
from shared.messages.request import SamplingParams
from tests.gpu_worker.toy_engine import (
    PAGE,
    VOCAB,
    Bench,
    floats,
    greedy,
    open_slot,
    prefill,
    tokens,
    toy_greedy,
    toy_logits,
)

PROMPT = [5, 17, 3, 88, 41, 9, 60]

pytestmark = pytest.mark.usefixtures("both_engines")


def test_prefill_then_decode_is_the_model() -> None:
    assert Bench().run(PROMPT, 9, greedy()) == toy_greedy(PROMPT, 9)


def test_chunks_and_page_appends_give_the_same_tokens() -> None:
    bench = Bench()
    bench.step(opens=(open_slot(2, len(PROMPT), [9]),), prefills=(prefill(2, PROMPT[:3], sample=False),))
    first = bench.step(prefills=(prefill(2, PROMPT[3:]),), page_slots=pack([2, 2]), page_ids=pack([4, 30]))
    out = tokens(first)
    for _ in range(4):
        out += tokens(bench.step([2]))
    assert out == toy_greedy(PROMPT, 5)


def test_a_chunk_that_does_not_sample_yields_no_token() -> None:
    bench = Bench()
    result = bench.step(opens=(open_slot(0, 7, [0, 1]),), prefills=(prefill(0, PROMPT, sample=False),))
    assert tokens(result) == []
    assert result.step_id == 0
    assert result.epoch == 1
    assert result.incarnation == 7


def test_rows_come_out_in_the_order_of_the_command() -> None:
    bench = Bench()
    prompts = {slot: [slot + 1, 2, 3] for slot in range(4)}
    opens = tuple(open_slot(s, 3, [s * 4, s * 4 + 1]) for s in prompts)
    bench.step(opens=opens[:2], prefills=tuple(prefill(s, prompts[s]) for s in (0, 1)))
    mixed = bench.step(
        [1, 0], opens=opens[2:], prefills=(prefill(3, prompts[3]), prefill(2, prompts[2][:2], sample=False))
    )
    assert tokens(mixed) == [toy_greedy(prompts[1], 2)[1], toy_greedy(prompts[0], 2)[1], toy_greedy(prompts[3], 1)[0]]
    batch = bench.runner.batches[-1]
    assert batch.num_decode_rows == 2
    assert batch.qo_indptr.tolist() == [0, 1, 2, 5, 7]
    assert batch.kv_lengths.tolist() == [4, 4, 3, 2]


def test_a_prefix_hit_prefills_the_suffix_only() -> None:
    bench = Bench()
    bench.step(opens=(open_slot(0, 7, [0, 1]),), prefills=(prefill(0, PROMPT),))
    hit = open_slot(1, 7, [0, 2], computed=PAGE)
    result = bench.step(opens=(hit,), prefills=(prefill(1, PROMPT[PAGE:]),))
    assert tokens(result) == toy_greedy(PROMPT, 1)
    assert bench.runner.batches[-1].num_tokens == 3


def test_a_copied_page_carries_a_partial_hit() -> None:
    bench = Bench()
    bench.step(opens=(open_slot(0, 7, [0, 1]),), prefills=(prefill(0, PROMPT),))
    other = [*PROMPT[:6], 77, 78]
    hit = open_slot(1, 8, [0, 5], computed=6)
    both = bench.step([0], opens=(hit,), page_copies=pack([1, 5]), prefills=(prefill(1, other[6:]),))
    assert tokens(both) == [toy_greedy(PROMPT, 2)[1], toy_greedy(other, 1)[0]]


def test_copies_are_read_before_any_target_is_written() -> None:
    bench = Bench()
    keys = bench.runner.kv_cache.layers[0]
    keys[0], keys[1] = 3.0, 4.0
    bench.step(page_copies=pack([0, 8, 1, 9, 0, 10]))
    assert keys[8].unique().tolist() == [3.0]
    assert keys[9].unique().tolist() == [4.0]
    assert keys[10].unique().tolist() == [3.0]


@pytest.mark.parametrize("pairs", [[0, 1, 1, 2], [0, 5, 1, 5], [0], [0, 64], [-1, 3]])
def test_bad_copies_are_refused(pairs: list[int]) -> None:
    with pytest.raises(ProtocolError):
        Bench().step(page_copies=pack(pairs))


def test_a_slot_that_met_its_stop_token_is_skipped_in_the_step_already_sent() -> None:
    expected = toy_greedy(PROMPT, 3)
    bench = Bench()
    opened = open_slot(0, 7, [0, 1, 2], greedy(stop_token_ids=(expected[1], 3)))
    neighbour = open_slot(1, 3, [10, 11])
    bench.step(opens=(opened, neighbour), prefills=(prefill(0, PROMPT), prefill(1, [1, 2, 3])))
    assert tokens(bench.step([0, 1]))[0] == expected[1]
    before = bench.engine.slots.computed[0]
    skipped = bench.step([0, 1])
    assert tokens(skipped) == [-1, toy_greedy([1, 2, 3], 3)[2]]
    assert bench.engine.slots.computed[0] == before
    assert bench.runner.batches[-1].num_rows == 1
    assert not skipped.errors


def test_a_slot_samples_no_more_than_it_may() -> None:
    bench = Bench()
    opened = open_slot(0, 7, [0, 1, 2], remaining=2)
    out = tokens(bench.step(opens=(opened,), prefills=(prefill(0, PROMPT),)))
    out += tokens(bench.step([0])) + tokens(bench.step([0]))
    assert out == [*toy_greedy(PROMPT, 2), -1]


def test_prefill_only_still_fills_the_cache() -> None:
    bench = Bench()
    opened = open_slot(0, 7, [0, 1], remaining=0)
    assert tokens(bench.step(opens=(opened,), prefills=(prefill(0, PROMPT, sample=False),))) == []
    hit = open_slot(1, 8, [0, 1], computed=7)
    assert tokens(bench.step(opens=(hit,), prefills=(prefill(1, [50]),))) == toy_greedy([*PROMPT, 50], 1)


def test_nothing_is_forwarded_where_no_row_runs() -> None:
    bench = Bench()
    bench.step(opens=(open_slot(0, 7, [0, 1], remaining=1),), prefills=(prefill(0, PROMPT),))
    assert tokens(bench.step([0])) == [-1]
    assert tokens(bench.step(closes=pack([0]))) == []
    assert len(bench.runner.batches) == 1


def test_forced_tokens_go_in_as_a_prefill_and_decoding_goes_on() -> None:
    bench = Bench()
    bench.step(opens=(open_slot(0, 7, [0, 1, 2, 3]),), prefills=(prefill(0, PROMPT),))
    first = toy_greedy(PROMPT, 1)[0]
    forced = [first, 11, 12]
    out = tokens(bench.step(prefills=(prefill(0, forced),))) + tokens(bench.step([0]))
    assert out == toy_greedy([*PROMPT, *forced], 2)


def test_a_closed_slot_is_free_for_the_next_in_the_same_command() -> None:
    bench = Bench()
    bench.step(opens=(open_slot(0, 7, [0, 1], greedy(stop_token_ids=(1, 2))),), prefills=(prefill(0, PROMPT),))
    again = bench.step(closes=pack([0]), opens=(open_slot(0, 3, [0]),), prefills=(prefill(0, [1, 2, 3]),))
    assert tokens(again) == toy_greedy([1, 2, 3], 1)


def test_nan_logits_end_one_row_only() -> None:
    bench = Bench()
    bench.runner.broken_tokens = {99}
    opens = (open_slot(0, 3, [0, 1]), open_slot(1, 3, [4, 5]))
    result = bench.step(opens=opens, prefills=(prefill(0, [1, 2, 99]), prefill(1, [1, 2, 3])))
    assert tokens(result) == [-1, toy_greedy([1, 2, 3], 1)[0]]
    assert [e.slot for e in result.errors] == [0]
    assert "finite" in result.errors[0].detail
    after = bench.step([0, 1])
    assert tokens(after) == [-1, toy_greedy([1, 2, 3], 2)[1]]
    assert not after.errors


@pytest.mark.parametrize(
    ("params", "ids"),
    [
        (greedy(), [1, VOCAB]),
        (greedy(), [1, -5]),
        (greedy(logit_bias_ids=pack([VOCAB]), logit_bias_values=np.ones(1, "<f4").tobytes()), [1]),
        (greedy(logprob_token_ids=pack([VOCAB])), [1]),
    ],
)
def test_ids_outside_the_vocabulary_end_one_request_only(params: SamplingParams, ids: list[int]) -> None:
    bench = Bench()
    opens = (open_slot(0, len(ids), [0], params), open_slot(1, 3, [4, 5]))
    result = bench.step(opens=opens, prefills=(prefill(0, ids), prefill(1, [1, 2, 3])))
    assert tokens(result) == [-1, toy_greedy([1, 2, 3], 1)[0]]
    assert [e.slot for e in result.errors] == [0]
    assert "vocabulary" in result.errors[0].detail


def test_the_pages_of_a_refused_request_are_still_written() -> None:
    bench = Bench()
    refused = greedy(logprob_token_ids=pack([VOCAB]))
    bad = open_slot(0, 8, [0, 1], refused)
    result = bench.step(opens=(bad,), prefills=(prefill(0, PROMPT[:5], sample=False),))
    assert [e.slot for e in result.errors] == [0]
    later = bench.step(prefills=(prefill(0, [*PROMPT[5:], VOCAB]),))
    assert tokens(later) == [-1]
    assert not later.errors
    hit = open_slot(1, 8, [0, 1], computed=7)
    assert tokens(bench.step(opens=(hit,), prefills=(prefill(1, [50]),))) == toy_greedy([*PROMPT, 50], 1)


def test_a_prefill_after_a_skipped_decode_row_does_not_run() -> None:
    bench = Bench()
    bench.step(opens=(open_slot(0, 7, [0, 1, 2], remaining=1),), prefills=(prefill(0, PROMPT),))
    assert tokens(bench.step([0])) == [-1]
    assert tokens(bench.step(prefills=(prefill(0, [1, 2]),))) == [-1]
    assert len(bench.runner.batches) == 1


def test_columns_of_what_a_step_was() -> None:
    bench = Bench()
    bench.step(opens=(open_slot(0, 7, [0, 1, 2]),), prefills=(prefill(0, PROMPT),))
    assert (bench.engine.stats.prefill_rows, bench.engine.stats.tokens) == (1, 7)
    result = bench.step([0])
    assert (bench.engine.stats.decode_rows, bench.engine.stats.tokens) == (1, 1)
    assert result.forward_ms > 0


def test_groups_name_the_rows_that_share_pages() -> None:
    bench = Bench()
    shared = [0, 1]
    bench.step(opens=(open_slot(0, 8, [*shared, 2]),), prefills=(prefill(0, [*PROMPT, 1]),))
    opens = tuple(open_slot(s, 9, [*shared, 2 + s], computed=8, remaining=9 if s != 2 else 1) for s in (1, 2, 3))
    bench.step([0], opens=opens, prefills=tuple(prefill(s, [s]) for s in (1, 2, 3)))
    columns = {"group_slots": pack([3, 2, 1]), "group_sizes": pack([3]), "group_pages": pack([2])}
    bench.step([0, 1, 2, 3], **columns)
    (group,) = bench.runner.batches[-1].groups
    assert group.num_pages == 2
    assert group.rows.tolist() == [2, 1]  # slot 2 has ended; 3 and 1 are rows 2 and 1
    with pytest.raises(ProtocolError):
        bench.step([0, 1, 3], group_slots=pack([3, 1]), group_sizes=pack([2]), group_pages=pack([3]))


def test_a_group_whose_pages_differ_is_refused() -> None:
    bench = Bench()
    opens = (open_slot(0, 5, [0, 1]), open_slot(1, 5, [2, 3]))
    bench.step(opens=opens, prefills=(prefill(0, PROMPT[:5]), prefill(1, PROMPT[:5])))
    with pytest.raises(ProtocolError, match="differ"):
        bench.step([0, 1], group_slots=pack([0, 1]), group_sizes=pack([2]), group_pages=pack([1]))


def test_scores_of_output_tokens_are_raw() -> None:
    params = greedy(
        logprobs=3, logprob_token_ids=pack([7, 8]), repetition_penalty=1.9, min_new_tokens=3, stop_token_ids=(2,)
    )
    bench = Bench()
    result = bench.step(opens=(open_slot(0, 7, [0, 1], params),), prefills=(prefill(0, PROMPT),))
    (row,) = result.scores
    logits = toy_logits(PROMPT).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum())
    best = np.argsort(-expected)[:3]
    assert row.row == 0
    assert row.scores.count == 1
    assert np.frombuffer(row.scores.top_ids, "<i4").tolist() == best.tolist()
    assert floats(row.scores.top_logprobs) == pytest.approx(expected[best], abs=1e-5)
    assert floats(row.scores.logprobs) == pytest.approx([expected[tokens(result)[0]]], abs=1e-5)
    assert floats(row.scores.wanted) == pytest.approx(expected[[7, 8]], abs=1e-5)


@pytest.mark.parametrize("start", [0, 1, 3, 6])
@pytest.mark.parametrize("sizes", [[12], [5, 7], [1, 1, 10], [4, 4, 4]])
def test_prompt_scores_do_not_depend_on_chunk_borders(start: int, sizes: list[int]) -> None:
    prompt = [(7 * i + 3) % VOCAB for i in range(12)]
    params = greedy(logprobs=2, prompt_logprobs_from=start, logprob_token_ids=pack([1]))
    bench = Bench()
    columns: dict[str, bytes] = {"logprobs": b"", "top_ids": b"", "top_logprobs": b"", "wanted": b""}
    at, count = 0, 0
    for size in sizes:
        end = at + size
        row = prefill(0, prompt[at:end], end == 12, score_from=start, next_token=prompt[end] if end < 12 else -1)
        result = bench.step(opens=(open_slot(0, 12, [0, 1, 2, 3], params),) if at == 0 else (), prefills=(row,))
        at = end
        for scored in result.prompt_scores:
            assert scored.row == 0
            count += scored.scores.count
            columns = {name: data + getattr(scored.scores, name) for name, data in columns.items()}
    assert count == 12 - start
    assert [len(c) // 4 for c in columns.values()] == [count, 2 * count, 2 * count, count]
    expected = [_logprob(prompt[:i])[prompt[i]] if i else np.nan for i in range(start, 12)]
    assert floats(columns["logprobs"]) == pytest.approx(expected, abs=1e-5, nan_ok=True)
    wanted = [_logprob(prompt[:i])[1] if i else np.nan for i in range(start, 12)]
    assert floats(columns["wanted"]) == pytest.approx(wanted, abs=1e-5, nan_ok=True)


def _logprob(seen: list[int]) -> np.ndarray:
    logits = toy_logits(seen).astype(np.float64)
    return logits - np.log(np.exp(logits).sum())


def test_nan_in_scored_logits_ends_that_request_only() -> None:
    bench = Bench()
    bench.runner.broken_tokens = {99}
    opens = (open_slot(0, 4, [0, 1], greedy(prompt_logprobs_from=1)), open_slot(1, 3, [4, 5]))
    rows = (prefill(0, [1, 99, 2, 3], score_from=1), prefill(1, [1, 2, 3]))
    result = bench.step(opens=opens, prefills=rows)
    assert tokens(result) == [-1, toy_greedy([1, 2, 3], 1)[0]]
    assert [e.slot for e in result.errors] == [0]


def seeded(seed: int, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.9, seed=seed, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [seeded(11), seeded(12, top_k=20, top_p=0.9), seeded(2**62 + 5, min_p=0.05)])
def test_a_seeded_answer_is_the_same_alone_in_a_batch_and_after_a_resume(params: SamplingParams) -> None:
    alone = Bench().run(PROMPT, 10, params)
    assert alone != toy_greedy(PROMPT, 10)
    bench = Bench(context=32)
    others = [greedy(), seeded(3), seeded(4, top_k=3)]
    opens = [open_slot(s + 1, 3, [20 + 8 * s + i for i in range(8)], p) for s, p in enumerate(others)]
    bench.step(opens=tuple(opens), prefills=tuple(prefill(s + 1, [s, 2, 3]) for s in range(3)))
    out = tokens(bench.step([3, 1], opens=(open_slot(0, 7, [0, 1, 2, 3, 4], params),), prefills=(prefill(0, PROMPT),)))[
        2:
    ]
    for _ in range(4):
        out += tokens(bench.step([2, 0, 1]))[1:2]
    resumed = [*PROMPT, *out]
    bench.step(closes=pack([0]))
    again = open_slot(5, 7, [10, 11, 12, 13, 14], params)
    out += tokens(bench.step([1], opens=(again,), prefills=(prefill(5, resumed),)))[1:]
    for _ in range(4):
        out += tokens(bench.step([5]))
    assert out == alone


def test_penalties_count_the_history_of_a_resumed_request() -> None:
    params = seeded(5, repetition_penalty=1.3, frequency_penalty=0.7, presence_penalty=0.4)
    alone = Bench().run(PROMPT, 8, params)
    bench = Bench()
    resumed = [*PROMPT, *alone[:4]]
    bench.step(opens=(open_slot(1, 11, [0, 1, 2, 3]),), prefills=(prefill(1, resumed, sample=False),))
    for computed in (0, 4, 8):
        pages = [0, 1, 2, 3][: computed // PAGE] + [20, 21, 22, 23][computed // PAGE :]
        opened = open_slot(0, 7, pages, params, computed=computed, history=resumed[:computed])
        out = tokens(bench.step(opens=(opened,), prefills=(prefill(0, resumed[computed:]),)))
        for _ in range(3):
            out += tokens(bench.step([0]))
        bench.step(closes=pack([0]))
        assert out == alone[4:], computed


def test_masks_are_applied_to_their_rows_only() -> None:
    bench = Bench()
    opens = (open_slot(0, 3, [0, 1]), open_slot(1, 3, [4, 5]), open_slot(2, 3, [8, 9], remaining=1))
    rows = tuple(prefill(s, [s + 1, 2, 3]) for s in range(3))
    bench.step(opens=opens, prefills=rows)
    words = np.zeros((2, -(-VOCAB // 32)), dtype="<u4")
    words[0] = 0xFFFFFFFF
    words[1, 64 // 32] = 1 << 5
    bench.masks[1] = (pack([2, 1]), words.tobytes())
    result = bench.step([0, 1, 2], masked_slots=pack([2, 1]))
    assert tokens(result) == [toy_greedy([1, 2, 3], 2)[1], 69, -1]


def test_a_mask_that_allows_nothing_ends_one_row_only() -> None:
    bench = Bench()
    opens = (open_slot(0, 3, [0, 1]), open_slot(1, 3, [4, 5], seeded(3)))
    bench.masks[0] = (pack([1]), bytes(16))
    result = bench.step(opens=opens, prefills=(prefill(0, [1, 2, 3]), prefill(1, [1, 2, 3])), masked_slots=pack([1]))
    assert tokens(result) == [toy_greedy([1, 2, 3], 1)[0], -1]
    assert [(e.slot, e.detail) for e in result.errors] == [(1, "no token is allowed")]


def test_masks_that_do_not_fit_are_refused() -> None:
    for masks in ((pack([0]), bytes(12)), (pack([1]), bytes(16)), (b"", b"")):
        bench = Bench()
        bench.masks[0] = masks
        with pytest.raises(ProtocolError):
            bench.step(opens=(open_slot(0, 3, [0]),), prefills=(prefill(0, [1, 2, 3]),), masked_slots=pack([0]))


def test_a_mask_that_allows_only_the_end_wins_over_min_new_tokens() -> None:
    for allowed, expected in (([40], 40), ([40, 41], 41)):
        bench = Bench()
        words = np.zeros((1, -(-VOCAB // 32)), dtype="<u4")
        for token in allowed:
            words[0, token // 32] |= 1 << (token % 32)
        bench.masks[0] = (pack([0]), words.tobytes())
        params = greedy(min_new_tokens=5, stop_token_ids=(40,))
        opened = open_slot(0, 3, [0, 1], params)
        result = bench.step(opens=(opened,), prefills=(prefill(0, [1, 2, 3]),), masked_slots=pack([0]))
        assert tokens(result) == [expected]


def test_min_new_tokens_holds_back_the_stop_token() -> None:
    free = toy_greedy(PROMPT, 4)
    params = greedy(min_new_tokens=2, stop_token_ids=(free[0],))
    out = Bench().run(PROMPT, 4, params)
    assert free[0] not in out[:2]
    assert out[0] == int(np.argsort(-toy_logits(PROMPT))[1])


def test_a_failing_model_raises_and_reset_makes_room_again() -> None:
    bench = Bench()
    bench.runner.error = RuntimeError("boom")
    with pytest.raises(RuntimeError, match="boom"):
        bench.step(opens=(open_slot(0, 3, [0]),), prefills=(prefill(0, [1, 2, 3]),))
    bench.runner.error = None
    bench.engine.reset()
    assert bench.run(PROMPT, 3, greedy()) == toy_greedy(PROMPT, 3)
