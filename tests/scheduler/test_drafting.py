"""Guessed tokens: the answers are those without guesses, whatever is guessed, in fewer steps."""

from __future__ import annotations

import pytest

from shared.messages.stream import FinishReason
from tests.fake_model import expected_scores, generate
from tests.local_fleet import LocalFleet, tokens
from tests.scheduler.guesses import let_guess

DRAFTS = 7


def guessing_fleet(**options: object) -> LocalFleet:
    fleet = LocalFleet(hello={"max_drafts": DRAFTS, "max_slots": 8}, **options)  # type: ignore[arg-type]
    for worker in fleet.workers.values():
        worker.engine.ms_per_step = 20.0
    return fleet


@pytest.mark.parametrize("most", [1, 3, 7, 40])
def test_answers_are_the_same_in_fewer_steps(most: int) -> None:
    fleet = guessing_fleet()
    let_guess(fleet, most)
    rids = [fleet.submit(tokens(20, seed=i), 60) for i in range(5)]
    fleet.run()
    fleet.assert_answered(*rids)
    counters, [worker] = fleet.core.metrics.counters, fleet.workers.values()
    assert 0 < counters["accepted_draft_tokens"] < counters["draft_tokens"]
    assert counters["draft_tokens"] == worker.engine.guesses
    assert counters["accepted_draft_tokens"] == worker.engine.right_guesses
    assert counters["steps"] < 60
    assert counters["decode_tokens"] == 300


def test_a_prompt_that_was_answered_is_answered_from_the_tree() -> None:
    fleet = guessing_fleet()
    prompt = tokens(37, seed=1)
    first = fleet.submit(prompt, 50)
    fleet.run()
    before = fleet.core.metrics.counters["steps"]
    again = fleet.submit(prompt, 50)
    fleet.run()
    fleet.assert_answered(first, again)
    assert fleet.core.metrics.counters["steps"] - before <= 1 + -(-49 // (DRAFTS + 1)) + 1


def test_what_another_namespace_was_answered_is_not_guessed() -> None:
    fleet = guessing_fleet()
    prompt = tokens(37, seed=1)
    first = fleet.submit(prompt, 50, namespace=b"a")
    fleet.run()
    other = fleet.submit(prompt, 50, namespace=b"b")
    fleet.run()
    fleet.assert_answered(first, other)
    assert not fleet.core.metrics.counters["accepted_draft_tokens"]


def test_stop_tokens_and_limits_within_guesses() -> None:
    fleet = guessing_fleet()
    let_guess(fleet, seed=3)
    prompt = tokens(9, seed=5)
    whole = fleet.submit(prompt, 40)
    fleet.run()
    answer = fleet.stream(whole).tokens
    rids = [
        fleet.submit(prompt, 40, stop_token_ids=(answer[n],), min_new_tokens=minimum)
        for n, minimum in ((3, 0), (11, 0), (12, 12), (20, 30))
    ]
    rids += [fleet.submit(prompt, count) for count in (1, 2, 3, 9, 39)]
    fleet.run()
    fleet.assert_answered(*rids)
    assert fleet.stream(rids[0]).finish is not None
    assert fleet.stream(rids[0]).finish.reason is FinishReason.STOP


def test_a_pool_that_is_too_small_cuts_guesses_and_not_answers() -> None:
    fleet = LocalFleet(hello={"max_drafts": 15, "max_slots": 8, "num_pages": 14, "page_size": 4}, page_size=4)
    [worker] = fleet.workers.values()
    worker.engine.ms_per_step = 20.0
    let_guess(fleet, 15)
    rids = [fleet.submit(tokens(5, seed=i), 30) for i in range(6)]
    fleet.run()
    fleet.assert_answered(*rids)
    assert fleet.core.metrics.counters["retractions"]
    assert worker.engine.right_guesses


def test_a_lost_worker_takes_no_guess_with_it() -> None:
    fleet = guessing_fleet(workers=2)
    let_guess(fleet)
    rids = [fleet.submit(tokens(30, seed=i), 50) for i in range(6)]
    fleet.advance(9)
    fleet.lose_worker(next(iter(fleet.workers.values())))
    fleet.run()
    fleet.assert_answered(*rids)


@pytest.mark.parametrize(
    "fields", [{"logprobs": 1}, {"repetition_penalty": 1.2}, {"presence_penalty": 0.5}, {"prompt_logprobs_from": 0}]
)
def test_who_may_not_guess_does_not(fields: dict[str, float]) -> None:
    fleet = guessing_fleet()
    prompt = tokens(37, seed=1)
    fleet.submit(prompt, 30)
    fleet.run()
    rid = fleet.submit(prompt, 30, **fields)
    fleet.run()
    fleet.assert_answered(rid)
    assert not fleet.core.metrics.counters["draft_tokens"]


def test_scores_beside_guesses_are_those_of_their_own_row() -> None:
    fleet = guessing_fleet()
    let_guess(fleet)
    guessing = [fleet.submit(tokens(30, seed=i), 50) for i in range(3)]
    prompts = [tokens(20 + i, seed=50 + i) for i in range(3)]
    scored = []
    for prompt in prompts:  # each comes while the others guess, so that its first score is one of a prefill's
        scored.append(fleet.submit(prompt, 12, logprobs=0))
        for _ in range(2):
            fleet.turn()
            [fleet.step(worker) for worker in fleet.workers.values() if worker.commands]
    fleet.run()
    fleet.assert_answered(*guessing, *scored)
    assert fleet.core.metrics.counters["accepted_draft_tokens"]
    for rid, prompt in zip(scored, prompts, strict=True):
        whole = [*prompt, *fleet.stream(rid).tokens]
        assert fleet.stream(rid).logprobs.tolist() == expected_scores(whole, len(prompt), len(whole))


@pytest.mark.parametrize("config", [{"speculative_algorithm": "none"}, {"speculative_num_draft_tokens": 2}])
def test_guesses_can_be_limited_and_switched_off(config: dict[str, object]) -> None:
    fleet = guessing_fleet(**config)
    prompt = tokens(37, seed=1)
    for _ in range(2):
        fleet.submit(prompt, 50)
        fleet.run()
    [worker] = fleet.workers.values()
    rows = [row.drafts for step in worker.engine.steps for row in step.prefills]
    assert max(rows, default=0) == config.get("speculative_num_draft_tokens", 0)


def busy_fleet(**options: object) -> LocalFleet:
    """Rows are so dear that planning ahead costs nothing."""
    fleet = guessing_fleet(**options)
    for worker in fleet.workers.values():
        worker.engine.ms_per_step, worker.engine.ms_per_token = 0.2, 0.05
    return fleet


@pytest.mark.parametrize("most", [1, 3, 7])
@pytest.mark.parametrize("count", [2, 8, 14])
def test_many_rows_guess_ahead_of_results(most: int, count: int) -> None:
    fleet = busy_fleet()
    let_guess(fleet, most)
    rids = [fleet.submit(tokens(20, seed=i), 40 + i) for i in range(count)]
    fleet.run()
    fleet.assert_answered(*rids)
    [worker] = fleet.workers.values()
    counters = fleet.core.metrics.counters
    assert worker.engine.expected > worker.engine.disappointed > 0
    assert counters["draft_tokens"] == worker.engine.guesses
    assert counters["accepted_draft_tokens"] == worker.engine.right_guesses > 0


def test_few_rows_wait_for_results() -> None:
    fleet = guessing_fleet()
    let_guess(fleet, 7)
    rids = [fleet.submit(tokens(20, seed=i), 40) for i in range(2)]
    fleet.run()
    fleet.assert_answered(*rids)
    [worker] = fleet.workers.values()
    assert worker.engine.expected == 0


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("pages", [40, 400])
def test_rows_ahead_end_and_lose_their_seats(depth: int, pages: int) -> None:
    fleet = LocalFleet(
        hello={"max_drafts": 7, "max_slots": 8, "num_pages": pages, "page_size": 4, "max_inflight_steps": depth},
        page_size=4,
    )
    [worker] = fleet.workers.values()
    worker.engine.ms_per_step, worker.engine.ms_per_token = 0.2, 0.05
    let_guess(fleet, 5)
    prompts = [tokens(9, seed=i) for i in range(12)]
    answers = [generate(prompt, 40) for prompt in prompts]
    rids = [
        fleet.submit(prompt, 40, stop_token_ids=(answer[5 + 2 * i],))
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]
    fleet.run()
    fleet.assert_answered(*rids)
    assert worker.engine.expected > 0


def test_an_answer_is_aborted_while_its_next_row_is_under_way() -> None:
    fleet = busy_fleet()
    let_guess(fleet, 5)
    [worker] = fleet.workers.values()
    rids = [fleet.submit(tokens(9, seed=i), 60) for i in range(8)]
    while not worker.engine.expected:
        fleet.turn()
        fleet.step(worker)
    fleet.turn()
    fleet.abort(rids[0], rids[3])
    fleet.run()
    fleet.assert_answered(*(rid for i, rid in enumerate(rids) if i not in (0, 3)))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 23, 40])
def test_answers_of_the_tree_are_guessed_ahead_to_their_ends(length: int) -> None:
    """The same prompts again, asking for less and for more than is known."""
    fleet = busy_fleet()
    prompts = [tokens(20, seed=i) for i in range(10)]
    first = [fleet.submit(prompt, length) for prompt in prompts]
    fleet.run()
    again = [fleet.submit(prompt, max(length + extra, 1)) for extra, prompt in zip(range(-3, 7), prompts, strict=True)]
    fleet.run()
    fleet.assert_answered(*first, *again)
    [worker] = fleet.workers.values()
    counters = fleet.core.metrics.counters
    assert counters["workers_lost"] == counters["internal_errors"] == 0
    assert counters["draft_tokens"] == worker.engine.guesses
