"""One worker, plain requests: tokens, caching, chunks, run-ahead."""

from __future__ import annotations

import pytest

from shared.messages.stream import FinishReason
from tests.fake_model import generate
from tests.local_fleet import LocalFleet, tokens


def test_a_plain_request_gets_the_tokens_of_its_prompt() -> None:
    fleet = LocalFleet()
    rid = fleet.submit(tokens(40), 20)
    fleet.run()
    fleet.assert_answered(rid)
    assert fleet.stream(rid).finish.reason is FinishReason.LENGTH


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 200])
def test_a_repeated_prompt_computes_one_token(length: int) -> None:
    fleet = LocalFleet()
    first = fleet.submit(tokens(length), 5)
    fleet.run()
    computed = fleet.prefill_tokens
    second = fleet.submit(tokens(length), 5)
    fleet.run()
    fleet.assert_answered(first, second)
    assert fleet.stream(first).cached_tokens == 0
    assert fleet.stream(second).cached_tokens == length - 1
    assert fleet.prefill_tokens == computed + 1


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("chunk", [0, 7, 16, 33])
def test_run_ahead_and_chunk_size_change_nothing(depth: int, chunk: int) -> None:
    fleet = LocalFleet(hello={"max_inflight_steps": depth}, chunked_prefill_size=chunk)
    rids = [fleet.submit(tokens(30 + 23 * i, seed=i), 10 + i) for i in range(6)]
    fleet.run()
    fleet.assert_answered(*rids)


def test_requests_with_a_common_prefix_compute_it_once() -> None:
    fleet = LocalFleet(hello={"max_batched_tokens": 64})
    shared = tokens(150)
    rids = [fleet.submit(shared + tokens(10, seed=100 + i), 6) for i in range(16)]
    fleet.run()
    fleet.assert_answered(*rids)
    assert fleet.prefill_tokens <= 150 + 16 * 10 + 16
    again = fleet.submit(shared + tokens(10, seed=100), 6)
    fleet.run()
    assert fleet.stream(again).cached_tokens == 159


def test_without_the_radix_cache_everything_is_computed() -> None:
    fleet = LocalFleet(disable_radix_cache=True)
    rids = [fleet.submit(tokens(50), 4) for _ in range(4)]
    fleet.run()
    fleet.assert_answered(*rids)
    assert fleet.prefill_tokens == 200
    assert fleet.stream(rids[-1]).cached_tokens == 0


def test_a_stop_token_ends_the_request_and_only_it() -> None:
    fleet = LocalFleet()
    prompt = tokens(20)
    stop = generate(prompt, 10)[6]
    rid = fleet.submit(prompt, 10, stop_token_ids=(stop,))
    other = fleet.submit(tokens(20, seed=1), 10)
    fleet.run()
    fleet.assert_answered(rid, other)
    assert fleet.stream(rid).finish.matched_token == stop
    assert len(fleet.stream(rid).tokens) == 7
