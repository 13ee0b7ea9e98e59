"""Prompts that are known to their last token: nothing of them is computed again, and answers are the same.

The fake worker notices where a state is asked for that is not kept, or not that of the slot's tokens.
"""

from __future__ import annotations

import pytest

from tests.local_fleet import LocalFleet, LocalWorker, tokens

PAGE = 16


def fleet_of(num_pages: int = 256, **options: object) -> tuple[LocalFleet, LocalWorker]:
    fleet = LocalFleet(hello={"keeps_hidden": True, "max_slots": 8, "num_pages": num_pages}, **options)  # type: ignore[arg-type]
    [worker] = fleet.workers.values()
    return fleet, worker


@pytest.mark.parametrize("length", [1, 2, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, 5 * PAGE + 7])
@pytest.mark.parametrize("max_tokens", [1, 2, 40])
def test_a_known_prompt_computes_no_token(length: int, max_tokens: int) -> None:
    fleet, worker = fleet_of()
    prompt = tokens(length, seed=1)
    rids = []
    for _ in range(3):
        rids.append(fleet.submit(prompt, max_tokens))
        fleet.run()
    fleet.assert_answered(*rids)
    assert worker.engine.prefill_tokens == length
    assert worker.engine.recalls == 2
    assert [fleet.stream(rid).cached_tokens for rid in rids] == [0, length, length]


def test_equal_prompts_at_once_are_computed_once() -> None:
    fleet, worker = fleet_of()
    rids = [fleet.submit(tokens(50, seed=1), 20) for _ in range(6)]
    fleet.run()
    fleet.assert_answered(*rids)
    assert worker.engine.prefill_tokens == 50


def test_a_prompt_known_as_a_part_of_another_computes_its_last_token_once() -> None:
    fleet, worker = fleet_of()
    whole = tokens(90, seed=1)
    first = fleet.submit(whole, 5)
    fleet.run()
    for part in (40, 3 * PAGE):
        before = worker.engine.prefill_tokens
        rids = [fleet.submit(whole[:part], 5) for _ in range(2)]
        fleet.run()
        fleet.assert_answered(first, *rids)
        assert worker.engine.prefill_tokens - before in (1, 2)  # at once: both are there before either is computed


def test_an_answer_goes_on_from_a_prompt_that_is_asked_again_meanwhile() -> None:
    fleet, worker = fleet_of()
    prompt = tokens(20, seed=1)
    first = fleet.submit(prompt, 60)
    for _ in range(10):
        fleet.turn()
    second = fleet.submit(prompt, 60)
    fleet.run()
    third = fleet.submit(prompt, 60)
    fleet.run()
    fleet.assert_answered(first, second, third)
    assert worker.engine.recalls == 2


def test_evicted_pages_take_their_states_with_them() -> None:
    fleet, worker = fleet_of(num_pages=12)
    rids = []
    for seed in (1, 2, 3, 1, 2, 3, 1, 1):
        rids.append(fleet.submit(tokens(5 * PAGE + 3, seed=seed), 4))
        fleet.run()
    fleet.assert_answered(*rids)
    assert worker.engine.recalls == 1
    assert len(fleet.core.fleet.workers[worker.key.encode()].pool.hidden) <= 2


@pytest.mark.parametrize("fields", [{"prompt_logprobs_from": 0}, {"prompt_logprobs_from": 30}])
def test_scores_of_a_prompt_are_computed(fields: dict[str, int]) -> None:
    fleet, worker = fleet_of()
    prompt = tokens(50, seed=1)
    plain = fleet.submit(prompt, 3)
    fleet.run()
    scored = fleet.submit(prompt, 3, **fields)
    fleet.run()
    fleet.assert_answered(plain, scored)
    assert worker.engine.recalls == 0


def test_what_is_only_cached_samples_nothing() -> None:
    fleet, worker = fleet_of()
    prompt = tokens(50, seed=1)
    rids = []
    for max_tokens in (3, 0, 3):
        rids.append(fleet.submit(prompt, max_tokens))
        fleet.run()
    fleet.assert_answered(*rids)
    assert worker.engine.recalls == 1


def test_penalised_and_scored_answers_recall_too() -> None:
    fleet, worker = fleet_of()
    prompt = tokens(50, seed=1)
    rids = []
    for fields in ({}, {"repetition_penalty": 1.3}, {"logprobs": 2}):
        rids.append(fleet.submit(prompt, 9, **fields))
        fleet.run()
    fleet.assert_answered(*rids)
    assert worker.engine.recalls == 2


@pytest.mark.parametrize("options", [{"disable_radix_cache": True}])
def test_without_a_tree_nothing_is_kept(options: dict[str, bool]) -> None:
    fleet, worker = fleet_of(**options)
    rids = [fleet.submit(tokens(50, seed=1), 3) for _ in range(2)]
    fleet.run()
    fleet.assert_answered(*rids)
    assert worker.engine.recalls == 0


def test_other_namespaces_recall_nothing() -> None:
    fleet, worker = fleet_of()
    rids = []
    for namespace in (b"a", b"b"):
        rids.append(fleet.submit(tokens(50, seed=1), 3, namespace=namespace))
        fleet.run()
    fleet.assert_answered(*rids)
    assert worker.engine.recalls == 0
