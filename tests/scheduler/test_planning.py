"""What goes into one step: rows, budgets, pages, and who loses a seat."""

from __future__ import annotations

import pytest

from shared import ints
from shared.messages.stream import FinishReason
from tests.local_fleet import LocalFleet, tokens


def test_a_long_prompt_never_stalls_running_streams() -> None:
    fleet = LocalFleet(hello={"max_batched_tokens": 32, "max_inflight_steps": 1})
    streams = [fleet.submit(tokens(10, seed=i), 200) for i in range(4)]
    fleet.turn()
    worker = fleet.workers["w0/1"]
    while not all(len(fleet.request(rid).output) for rid in streams):
        fleet.step(worker)
        fleet.turn()
    long = fleet.submit(tokens(600, seed=9), 5)
    fleet.turn()
    chunked_steps = 0
    while not fleet.request(long).output:
        command = worker.commands[0]
        assert len(ints.unpack(command.decode_slots)) == 4
        chunked_steps += bool(command.prefills)
        fleet.step(worker)
        fleet.turn()
    assert chunked_steps >= 600 // 28
    fleet.run()
    fleet.assert_answered(*streams, long)


def test_a_small_chunk_size_leaves_every_seat_a_token() -> None:
    fleet = LocalFleet(chunked_prefill_size=5, hello={"max_slots": 16})
    rids = [fleet.submit(tokens(20, seed=i), 10) for i in range(12)]
    fleet.turn()
    worker = fleet.workers["w0/1"]
    while worker.commands:
        command = worker.commands[0]
        size = len(command.decode_slots) // 4 + sum(len(row.token_ids) // 4 for row in command.prefills)
        assert size <= 5
        fleet.step(worker)
        fleet.turn()
    fleet.assert_answered(*rids)


def test_without_chunks_a_prompt_is_cut_only_where_no_step_could_take_it() -> None:
    fleet = LocalFleet(chunked_prefill_size=-1, hello={"max_batched_tokens": 100, "max_inflight_steps": 1})
    rids = [fleet.submit(tokens(60, seed=i), 1) for i in range(3)] + [fleet.submit(tokens(250, seed=9), 1)]
    fleet.turn()
    chunks = []
    worker = fleet.workers["w0/1"]
    while worker.commands:
        chunks.append([len(row.token_ids) // 4 for row in worker.commands[0].prefills])
        fleet.step(worker)
        fleet.turn()
    fleet.assert_answered(*rids)
    assert [chunk for chunk in chunks if chunk][:4] == [[60], [60], [60], [100]]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_steps_are_dispatched_ahead_as_far_as_both_sides_allow(depth: int) -> None:
    fleet = LocalFleet(hello={"max_inflight_steps": depth}, max_inflight_steps=3)
    fleet.submit(tokens(10), 50)
    fleet.turn()
    assert len(fleet.workers["w0/1"].commands) == min(depth, 3)


def test_a_limit_is_never_overrun_by_run_ahead() -> None:
    fleet = LocalFleet(hello={"max_inflight_steps": 4})
    rids = [fleet.submit(tokens(10, seed=n), n) for n in (1, 2, 3)]
    fleet.run()
    fleet.assert_answered(*rids)
    assert fleet.workers["w0/1"].engine.decode_rows == 0 + 1 + 2


@pytest.mark.parametrize("length", [1, 16, 40, 300])
def test_prefill_only_ends_with_length_and_without_tokens(length: int) -> None:
    fleet = LocalFleet(hello={"max_batched_tokens": 64})
    rid = fleet.submit(tokens(length), 0)
    fleet.run()
    assert fleet.stream(rid).tokens == []
    assert fleet.stream(rid).finish.reason is FinishReason.LENGTH
    assert fleet.prefill_tokens == length
    again = fleet.submit(tokens(length), 3)
    fleet.run()
    assert fleet.stream(again).cached_tokens == length - 1
    fleet.assert_answered(again)


def test_when_pages_run_out_the_youngest_are_suspended_and_nothing_is_lost() -> None:
    fleet = LocalFleet(hello={"num_pages": 24, "max_slots": 8})
    rids = [fleet.submit(tokens(40, seed=i), 100) for i in range(6)]
    fleet.run()
    fleet.assert_answered(*rids)
    retractions = [fleet.stream(rid).retractions for rid in rids]
    assert retractions[0] == 0, "the oldest keeps its seat"
    assert sum(retractions) > 0
    assert fleet.core.metrics.counters["retractions"] == sum(retractions)


def test_a_priority_keeps_its_seat_before_age() -> None:
    fleet = LocalFleet(hello={"num_pages": 24, "max_slots": 8})
    plain = [fleet.submit(tokens(40, seed=i), 100) for i in range(4)]
    urgent = fleet.submit(tokens(40, seed=8), 100, priority=3)
    fleet.run()
    fleet.assert_answered(*plain, urgent)
    assert fleet.stream(urgent).retractions == 0


def test_one_request_may_fill_the_whole_pool_but_for_a_page() -> None:
    fleet = LocalFleet(hello={"num_pages": 10})
    fits = fleet.submit(tokens(100), 9 * 16 - 100)
    too_long = fleet.submit(tokens(100), 9 * 16 - 100 + 1)
    fleet.run()
    fleet.assert_answered(fits)
    rejection = fleet.tokenizer.rejected[too_long]
    assert rejection.code == "too_long"
    assert "145" in rejection.detail
    assert "144" in rejection.detail
    again = fleet.submit(tokens(100), 9 * 16 - 100)
    fleet.run()
    fleet.assert_answered(again)
    assert fleet.stream(again).cached_tokens == 99


def test_equal_requests_that_hold_pages_twice_still_come_to_an_end() -> None:
    # Both generate the same tokens at the same time: the tree keeps one page, the other stays the request's own.
    fleet = LocalFleet(hello={"num_pages": 12, "max_slots": 2})
    rids = [fleet.submit(tokens(20), 150) for _ in range(2)]
    fleet.run()
    fleet.assert_answered(*rids)


def test_a_finished_request_is_closed_even_if_there_is_nothing_else_to_do() -> None:
    fleet = LocalFleet()
    fleet.submit(tokens(10), 3)
    fleet.run()
    assert fleet.workers["w0/1"].engine.open_slots == 0


def test_many_requests_on_a_small_pool_do_not_storm() -> None:
    fleet = LocalFleet(hello={"num_pages": 200, "max_slots": 32, "max_batched_tokens": 256})
    rids = [fleet.submit(tokens(50, seed=i), 120) for i in range(40)]
    fleet.run()
    fleet.assert_answered(*rids)
    assert fleet.core.metrics.counters["retractions"] <= 40
    assert fleet.core.metrics.counters["recomputed_tokens"] < 40 * 170


def test_a_cold_request_is_not_starved_by_hot_ones_under_lpm() -> None:
    fleet = LocalFleet(schedule_policy="lpm", ageing_seconds=5.0, hello={"max_slots": 1, "max_inflight_steps": 1})
    hot = tokens(64)
    fleet.submit(hot, 2)
    fleet.run()
    cold = fleet.submit(tokens(64, seed=5), 2)
    fleet.submit(hot, 2)
    fleet.turn()
    worker = fleet.workers["w0/1"]
    served_before = 0
    for _ in range(100):
        fleet.clock.advance(0.5)
        fleet.heartbeats()
        fleet.submit(hot, 2)  # there is always a hot one waiting
        if worker.commands:
            fleet.step(worker)
        fleet.turn()
        if not fleet.request(cold).live:
            break
        served_before += 1
    assert 5 < served_before < 40
    fleet.assert_answered(cold)


def test_sampling_history_is_sent_only_where_penalties_need_it() -> None:
    fleet = LocalFleet(hello={"max_inflight_steps": 1})
    fleet.submit(tokens(40), 3)
    fleet.run()
    fleet.submit(tokens(40), 3)
    fleet.submit(tokens(40), 3, repetition_penalty=1.1)
    fleet.turn()
    opens = fleet.workers["w0/1"].commands[0].opens
    assert [ints.unpack(opening.history).tolist() for opening in opens] == [[], tokens(40)[:39]]
    assert [opening.remaining for opening in opens] == [3, 3]


def test_namespaces_never_share_pages() -> None:
    fleet = LocalFleet()
    first = fleet.submit(tokens(50), 3, namespace=b"a")
    fleet.run()
    other = fleet.submit(tokens(50), 3, namespace=b"b")
    fleet.run()
    same = fleet.submit(tokens(50), 3, namespace=b"a")
    fleet.run()
    assert [fleet.stream(rid).cached_tokens for rid in (first, other, same)] == [0, 0, 49]


def test_the_next_turn_of_a_conversation_finds_prompt_and_answer() -> None:
    fleet = LocalFleet()
    first = fleet.submit(tokens(37), 30)
    fleet.run()
    history = tokens(37) + fleet.stream(first).tokens
    second = fleet.submit(history + tokens(9, seed=4), 5)
    fleet.run()
    assert fleet.stream(second).cached_tokens == len(history) - 1  # the last token was sampled, not computed
    fleet.assert_answered(second)


def test_a_page_to_copy_is_given_up_where_it_is_the_one_that_is_missing() -> None:
    fleet = LocalFleet(hello={"num_pages": 9, "max_batched_tokens": 256})
    shared = tokens(24)
    fleet.submit(shared + tokens(8, seed=1), 1)  # two pages; the second one is the source of a copy
    fleet.run()
    running = fleet.submit(tokens(40, seed=2), 60)  # three pages for now, seven in the end
    fleet.turn()
    before = fleet.workers["w0/1"].engine.copies
    rid = fleet.submit(shared + tokens(30, seed=3), 1)  # one page shared, three of its own, two in reserve
    fleet.step(fleet.workers["w0/1"])
    fleet.turn()
    assert fleet.request(rid).slot >= 0
    assert fleet.request(rid).cached_tokens == 16
    fleet.run()
    assert fleet.workers["w0/1"].engine.copies == before
    fleet.assert_answered(running, rid)
