"""What detokenizers and tokenizers are told, and what happens when they go."""

from __future__ import annotations

from array import array

import pytest

from shared import ints
from shared.messages.control import Heartbeat, Hello, Ping
from shared.messages.request import GenerateRequest, SamplingParams, StreamAck
from shared.messages.stream import FinishReason, StopMatched
from tests.fake_model import expected_scores, generate
from tests.local_fleet import LocalFleet, tokens
from tests.local_peers import LocalTokenizer


def steps(fleet: LocalFleet, count: int) -> None:
    worker = next(iter(fleet.workers.values()))
    for _ in range(count):
        fleet.step(worker)
        fleet.turn()


def test_a_stream_is_opened_before_its_first_token_with_what_a_detokenizer_needs() -> None:
    fleet = LocalFleet(workers=0)
    prompt = tokens(40)
    rid = fleet.submit(prompt, 5, stop_strings=("a", "b"), no_stop_trim=True, skip_special_tokens=False)
    fleet.turn()
    opening = fleet.stream(rid).opening
    assert opening.frontend_id == "t/1"
    assert opening.stop_strings == ("a", "b")
    assert opening.no_stop_trim
    assert not opening.skip_special_tokens
    assert opening.epoch == fleet.EPOCH
    assert opening.finish is None
    tail = ints.unpack(opening.prompt_tail).tolist()
    assert tail
    assert prompt[-len(tail) :] == tail


def test_tokens_of_one_turn_travel_together() -> None:
    fleet = LocalFleet()
    for index in range(8):
        fleet.submit(tokens(10, seed=index), 10)
    fleet.turn()
    before = fleet.detokenizer.num_messages
    steps(fleet, 1)
    assert fleet.detokenizer.num_messages == before + 1


def test_streams_are_spread_over_the_detokenizers() -> None:
    fleet = LocalFleet(workers=0)
    second = fleet.add_detokenizer("e/1")
    for index in range(6):
        fleet.submit(tokens(5, seed=index), 5)
    fleet.turn()
    assert len(fleet.detokenizer.streams) == len(second.streams) == 3


def test_generation_goes_on_without_any_detokenizer() -> None:
    fleet = LocalFleet()
    fleet.turn()
    fleet.core.lose_detokenizer(next(iter(fleet.core.outbox.detokenizers.values())), "test")
    rid = fleet.submit(tokens(20), 10)
    fleet.run()
    assert not fleet.request(rid).live
    assert rid not in fleet.detokenizer.streams
    late = fleet.add_detokenizer("late/1")
    fleet.turn()
    assert late.streams[rid].tokens == generate(tokens(20), 10)
    assert late.streams[rid].finish.reason is FinishReason.LENGTH


def test_a_lost_detokenizers_streams_are_opened_elsewhere_at_once() -> None:
    fleet = LocalFleet()
    rid = fleet.submit(tokens(20), 30, logprobs=1)
    fleet.turn()
    steps(fleet, 8)
    heir = fleet.add_detokenizer("heir/1")
    del fleet.detokenizer_edge.peers[b"d/1"]
    fleet.scheduler.disconnected(fleet.core.probe_detokenizers)
    fleet.turn()
    opening = heir.streams[rid].opening
    held = ints.unpack(opening.output_ids).tolist()
    assert held == generate(tokens(20), 30)[: len(held)]
    assert len(held) >= 8
    assert opening.scores.count == len(held)
    fleet.run()
    assert heir.streams[rid].tokens == generate(tokens(20), 30)
    whole = tokens(20) + generate(tokens(20), 30)
    assert heir.streams[rid].logprobs.tolist() == expected_scores(whole, 20, 50)


def test_a_silent_detokenizer_is_lost_and_a_stranger_must_say_hello() -> None:
    fleet = LocalFleet(workers=0)
    rid = fleet.submit(tokens(5), 5)
    fleet.turn()
    fleet.clock.advance(2.0)
    fleet.from_tokenizer(Heartbeat("t", 1))
    fleet.turn()
    fleet.clock.advance(1.5)
    fleet.turn()
    assert not fleet.core.outbox.detokenizers
    assert fleet.request(rid).detokenizer is None
    fleet.from_detokenizer(fleet.detokenizer, Heartbeat("d", 1))
    fleet.turn()
    assert not fleet.detokenizer.pongs[-1].healthy
    fleet.from_detokenizer(fleet.detokenizer, Hello("detokenizer", "d", 1, "ipc://d"))
    fleet.turn()
    assert fleet.detokenizer.pongs[-1].healthy
    assert fleet.request(rid).detokenizer is not None


def test_a_new_life_of_a_detokenizer_replaces_the_old_one() -> None:
    fleet = LocalFleet()
    rid = fleet.submit(tokens(20), 20)
    fleet.turn()
    steps(fleet, 5)
    again = fleet.add_detokenizer("d/2")
    fleet.run()
    assert again.streams[rid].tokens == generate(tokens(20), 20)
    assert [d.key for d in fleet.core.outbox.detokenizers.values()] == ["d/2"]


def test_a_detokenizer_that_is_behind_gets_fewer_and_larger_chunks() -> None:
    fleet = LocalFleet()
    rid = fleet.submit(tokens(20), 40)
    fleet.turn()
    only = next(iter(fleet.core.outbox.detokenizers.values()))
    only.chunks_sent = 5000
    fleet.from_detokenizer(fleet.detokenizer, Heartbeat("d", 1, gauges={"chunks_handled": 10.0}))
    fleet.run()
    assert fleet.stream(rid).tokens == []
    before = fleet.detokenizer.num_messages
    fleet.from_detokenizer(fleet.detokenizer, Heartbeat("d", 1, gauges={"chunks_handled": 5000.0}))
    fleet.turn()
    assert fleet.detokenizer.num_messages == before + 1
    fleet.assert_answered(rid)


def test_a_full_queue_towards_a_detokenizer_loses_nothing() -> None:
    fleet = LocalFleet()
    rid = fleet.submit(tokens(20), 40)
    fleet.turn()
    steps(fleet, 3)
    fleet.detokenizer_edge.busy.add(b"d/1")
    late = fleet.submit(tokens(9), 3)
    fleet.run()
    fleet.detokenizer_edge.busy.clear()
    fleet.turn()
    fleet.assert_answered(rid, late)


def test_prompt_scores_come_whole_with_the_first_token() -> None:
    prompt = tokens(70)
    for chunk in (0, 7, 16):
        for start in (0, 1, 33, 69):
            fleet = LocalFleet(chunked_prefill_size=chunk)
            fleet.submit(prompt, 3)
            fleet.run()
            rid = fleet.submit(prompt, 3, prompt_logprobs_from=start, logprobs=2)
            fleet.run()
            fleet.assert_answered(rid)
            scores = array("f", fleet.stream(rid).prompt_scores.logprobs).tolist()
            wanted = expected_scores(prompt, start, 70)
            assert len(scores) == 70 - start
            assert scores[1:] == wanted[1:]
            assert scores[0] == wanted[0] or start == 0
            assert fleet.stream(rid).cached_tokens == max(start - 1, 0)


def test_prompt_scores_survive_a_resume_in_the_middle_of_the_prompt() -> None:
    prompt = tokens(100)
    fleet = LocalFleet(workers=2, hello={"max_batched_tokens": 16, "max_inflight_steps": 1})
    rid = fleet.submit(prompt, 4, prompt_logprobs_from=0)
    fleet.turn()
    worker = fleet.workers[fleet.request(rid).worker.key]
    for _ in range(3):
        fleet.step(worker)
        fleet.turn()
    fleet.lose_worker(worker)
    fleet.run()
    fleet.assert_answered(rid)
    scores = array("f", fleet.stream(rid).prompt_scores.logprobs).tolist()
    assert scores[1:] == expected_scores(prompt, 0, 100)[1:]


@pytest.mark.parametrize("start", [0, 5, 20])
def test_scores_of_a_prompt_without_any_output(start: int) -> None:
    prompt = tokens(21)
    fleet = LocalFleet()
    rid = fleet.submit(prompt, 0, prompt_logprobs_from=start, logprobs=0)
    fleet.run()
    stream = fleet.stream(rid)
    assert stream.tokens == []
    assert array("f", stream.prompt_scores.logprobs).tolist()[1:] == expected_scores(prompt, start, 21)[1:]


def test_a_matched_stop_string_needs_no_last_chunk() -> None:
    fleet = LocalFleet()
    rid = fleet.submit(tokens(20), 100)
    fleet.turn()
    steps(fleet, 10)
    fleet.from_detokenizer(fleet.detokenizer, StopMatched(rid, 6, "stop", fleet.EPOCH))
    fleet.from_detokenizer(fleet.detokenizer, StopMatched(rid, 4, "stop", fleet.EPOCH))
    fleet.from_detokenizer(fleet.detokenizer, StopMatched("unknown", 4, "stop", fleet.EPOCH))
    fleet.run()
    request = fleet.request(rid)
    assert request.output.tolist() == generate(tokens(20), 6)
    assert request.finish.reason is FinishReason.STOP
    assert fleet.stream(rid).finish is None
    heir = fleet.add_detokenizer("d/2")  # it derives the match again from the ids
    fleet.turn()
    assert heir.streams[rid].finish.matched_string == "stop"
    assert heir.streams[rid].tokens == generate(tokens(20), 6)


def test_matches_of_another_epoch_or_of_a_lost_detokenizer_are_not_believed() -> None:
    fleet = LocalFleet()
    rid = fleet.submit(tokens(20), 30)
    fleet.turn()
    steps(fleet, 10)
    other = fleet.add_detokenizer("e/1")
    fleet.turn()
    fleet.from_detokenizer(fleet.detokenizer, StopMatched(rid, 6, "stop", fleet.EPOCH - 1))
    fleet.from_detokenizer(other, StopMatched(rid, 6, "stop", fleet.EPOCH))
    fleet.run()
    fleet.assert_answered(rid)


def test_a_request_is_kept_until_its_own_tokenizer_acknowledges() -> None:
    fleet = LocalFleet()
    other = fleet.add_tokenizer("o/1")
    rid, live = fleet.submit(tokens(20), 3), fleet.submit(tokens(20, seed=1), 500)
    fleet.turn()
    steps(fleet, 6)
    fleet.scheduler.receive(fleet.scheduler.handlers.from_tokenizer, other.key.encode(), StreamAck((rid, live)))
    fleet.turn()
    assert rid in fleet.core.lifecycle.requests
    fleet.acknowledge(rid, live, "unknown")
    fleet.turn()
    assert list(fleet.core.lifecycle.requests) == [live]


def test_what_nobody_acknowledges_is_forgotten_after_a_while() -> None:
    fleet = LocalFleet()
    rid = fleet.submit(tokens(20), 3)
    fleet.run()
    for _ in range(61):
        fleet.clock.advance(1.0)
        fleet.heartbeats()
        fleet.turn()
    assert rid not in fleet.core.lifecycle.requests


def test_a_lost_tokenizers_requests_end_and_are_forgotten() -> None:
    fleet = LocalFleet()
    second = fleet.add_tokenizer("o/1")
    mine, other = fleet.submit(tokens(20), 500), fleet.submit(tokens(20, seed=1), 500, tokenizer=second)
    fleet.turn()
    steps(fleet, 3)
    del fleet.tokenizer_edge.peers[b"t/1"]
    fleet.scheduler.disconnected(fleet.core.frontends.probe)
    fleet.turn()
    assert fleet.request(mine).live, "it may come back in a moment"
    for _ in range(3):
        fleet.clock.advance(1.0)
        fleet.heartbeats()
        fleet.turn()
    assert fleet.stream(mine).finish.reason is FinishReason.ABORT
    fleet.clock.advance(1.0)
    fleet.heartbeats()
    fleet.turn()
    assert list(fleet.core.lifecycle.requests) == [other]


def test_a_tokenizer_that_comes_back_within_a_moment_loses_nothing() -> None:
    fleet = LocalFleet()
    rid = fleet.submit(tokens(20), 30)
    fleet.turn()
    peer = fleet.tokenizer_edge.peers.pop(b"t/1")
    fleet.scheduler.disconnected(fleet.core.frontends.probe)
    fleet.turn()
    fleet.clock.advance(1.0)
    fleet.tokenizer_edge.peers[b"t/1"] = peer
    fleet.heartbeats()
    fleet.turn()
    fleet.clock.advance(1.5)
    fleet.heartbeats()
    fleet.run()
    fleet.assert_answered(rid)


def test_a_new_life_of_a_tokenizer_ends_the_requests_of_the_old_one() -> None:
    fleet = LocalFleet()
    rid = fleet.submit(tokens(20), 500)
    fleet.turn()
    fleet.add_tokenizer("t/2")
    fleet.turn()
    assert fleet.stream(rid).finish.reason is FinishReason.ABORT


def resubmission(fleet: LocalFleet, rid: str, held: list[int], max_tokens: int, **fields: object) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, stop_token_ids=fields.pop("stops", ()))
    prompt = ints.pack(fleet.prompts[rid])
    return GenerateRequest(rid, "t/1", prompt, sampling, epoch=fleet.EPOCH, output_ids=ints.pack(held), **fields)


@pytest.mark.parametrize("held", [1, 5, 16, 29])
def test_a_request_of_an_earlier_epoch_goes_on_where_its_frontend_is(held: int) -> None:
    fleet = LocalFleet()
    answer = generate(tokens(20), 30)
    fleet.prompts["r"] = tokens(20)
    fleet.from_tokenizer(resubmission(fleet, "r", answer[:held], 30))
    fleet.turn()
    assert ints.unpack(fleet.stream("r").opening.output_ids).tolist() == answer[:held]
    fleet.run()
    fleet.assert_answered("r")


def test_a_request_that_had_ended_before_the_epoch_ends_again() -> None:
    fleet = LocalFleet()
    answer = generate(tokens(20), 30)
    fleet.prompts["r"] = fleet.prompts["s"] = tokens(20)
    fleet.from_tokenizer(resubmission(fleet, "r", answer, 30))
    fleet.from_tokenizer(resubmission(fleet, "s", answer[:4], 30, stops=(answer[3],)))
    fleet.run()
    assert fleet.stream("r").finish.reason is FinishReason.LENGTH
    assert fleet.stream("s").finish.matched_token == answer[3]
    assert fleet.stream("s").tokens == answer[:4]
    assert fleet.prefill_tokens == 0


def test_a_resubmission_of_what_has_ended_here_tells_the_end_again() -> None:
    fleet = LocalFleet()
    rid = fleet.submit(tokens(20), 10)
    fleet.run()
    computed = fleet.prefill_tokens
    fleet.from_tokenizer(resubmission(fleet, rid, generate(tokens(20), 4), 10))
    fleet.run()
    fleet.assert_answered(rid)
    assert ints.unpack(fleet.stream(rid).opening.output_ids).tolist() == generate(tokens(20), 10)
    assert fleet.prefill_tokens == computed


def test_requests_of_another_epoch_are_dropped_in_silence() -> None:
    fleet = LocalFleet()
    fleet.submit(tokens(5), 5, rid="old", epoch=fleet.EPOCH - 1)
    fleet.submit(tokens(5), 5, rid="new", epoch=fleet.EPOCH)
    fleet.run()
    assert list(fleet.core.lifecycle.requests) == ["new"]
    assert not fleet.tokenizer.rejected


def test_pings_are_answered_through_the_loop_and_make_nobody_a_peer() -> None:
    fleet = LocalFleet(workers=0)
    pinger = LocalTokenizer("ping/1")
    pongs: list[object] = []
    fleet.tokenizer_edge.peers[b"ping/1"] = pongs.append
    fleet.from_tokenizer(Ping(5), pinger)
    assert not pongs
    fleet.turn()
    assert [pong.nonce for pong in pongs] == [5]
    assert b"ping/1" not in fleet.core.frontends.tokenizers


def test_prompt_scores_that_met_a_full_queue_are_sent_again() -> None:
    fleet = LocalFleet()
    prompt = tokens(20)
    rid = fleet.submit(prompt, 30, prompt_logprobs_from=0)
    fleet.turn()
    fleet.detokenizer_edge.busy.add(b"d/1")
    steps(fleet, 4)
    fleet.detokenizer_edge.busy.clear()
    fleet.run()
    fleet.assert_answered(rid)
    assert array("f", fleet.stream(rid).prompt_scores.logprobs).tolist()[1:] == expected_scores(prompt, 0, 20)[1:]
