"""Positions, tokens and scores of one request."""

from __future__ import annotations

import math
from array import array

from services.scheduler.request import Request
from services.scheduler.scores import ScoreLog, head, join
from shared import ints
from shared.messages.request import GenerateRequest, SamplingParams
from shared.messages.stream import Scores


def make(prompt: int = 10, output: int = 0, **sampling: int) -> Request:
    message = GenerateRequest(
        "r", "t/1", ints.pack(range(prompt)), SamplingParams(**sampling), output_ids=ints.pack(range(100, 100 + output))
    )
    return Request(message, b"t/1", 0.0, 1)


def block(*values: float, top: int = 0) -> Scores:
    count = len(values)
    return Scores(
        count,
        array("f", values).tobytes(),
        ints.pack(range(count * top)),
        array("f", [0.5] * (count * top)).tobytes(),
    )


def test_tokens_cross_from_prompt_into_output() -> None:
    request = make(4, 3)
    whole = [0, 1, 2, 3, 100, 101, 102]
    for start in range(8):
        for end in range(start, 8):
            assert ints.unpack(request.tokens(start, end)).tolist() == whole[start:end]
    assert request.token(3) == 3
    assert request.token(4) == 100
    assert request.known == 7


def test_the_last_token_is_always_computed() -> None:
    assert make(10).match_limit() == 9
    assert make(10, 5).match_limit() == 14
    assert make(1).match_limit() == 0


def test_prompt_scores_need_the_logits_before_them() -> None:
    assert make(10, prompt_logprobs_from=0).match_limit() == 0
    assert make(10, prompt_logprobs_from=1).match_limit() == 0
    assert make(10, prompt_logprobs_from=6).match_limit() == 5
    assert make(10, prompt_logprobs_from=9).match_limit() == 8
    assert make(10, prompt_logprobs_from=10).match_limit() == 9


def test_scores_already_received_need_not_be_computed_again() -> None:
    request = make(10, prompt_logprobs_from=2)
    request.prompt_scores.add(block(*range(5)))  # positions 2 .. 6
    assert request.prompt_scores_missing == 7
    assert request.match_limit() == 6
    request.prompt_scores.add(block(*range(3)))
    assert request.prompt_scores_missing == 10
    assert request.match_limit() == 9
    assert request.complete_prompt_scores().count == 8


def test_a_row_in_flight_is_not_taken_for_written() -> None:
    request = make(10)
    request.prefill_end = 10
    request.dispatched = 6
    assert request.written == 6  # in the middle of the prefill
    request.dispatched = 12  # two decode rows in flight, no result yet
    assert request.written == 10
    request.output.extend((7, 8))
    assert request.written == 11  # the second token was sampled, its KV comes with the next row
    request.output.append(9)
    assert request.written == 12


def test_joining_and_cutting_keep_columns_together() -> None:
    joined = join([block(1, 2, top=2), block(3, top=2)])
    assert joined.count == 3
    assert array("f", joined.logprobs).tolist() == [1, 2, 3]
    assert ints.unpack(joined.top_ids).tolist() == [0, 1, 2, 3, 0, 1]
    cut = head(joined, 2)
    assert cut.count == 2
    assert array("f", cut.logprobs).tolist() == [1, 2]
    assert len(ints.unpack(cut.top_ids)) == 4


def test_a_score_log_gives_what_is_new_and_everything() -> None:
    log = ScoreLog(0, SamplingParams(logprobs=0))
    for value in range(6):
        log.add(block(value))
    assert array("f", log.since(4, 6).logprobs).tolist() == [4, 5]
    assert log.since(6, 6) is None
    assert array("f", log.everything(6).logprobs).tolist() == [0, 1, 2, 3, 4, 5]
    log.add(block(6))
    assert array("f", log.since(6, 7).logprobs).tolist() == [6]
    assert log.everything(3).count == 3


def test_scores_of_an_earlier_life_are_unknown_not_missing() -> None:
    log = ScoreLog(2, SamplingParams(logprobs=1))
    assert log.everything(2) is None
    log.add(block(5, top=1))
    whole = log.everything(3)
    values = array("f", whole.logprobs).tolist()
    assert whole.count == 3
    assert math.isnan(values[0])
    assert math.isnan(values[1])
    assert values[2] == 5
    assert len(ints.unpack(whole.top_ids)) == 3
