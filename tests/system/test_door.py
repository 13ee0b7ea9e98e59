"""The rest of the API on the real model: scores equal cold and cached, patterns, sessions, candidates, pauses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from radixfleet.local_server import LocalServer
from tests.system.processes import eventually
from tests.system.servers import serving

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
TALE = (
    "Once upon a time, in a village by the sea, there lived an old fisherman who counted: one, two, three, four, five"
)
CLOSE = 1e-3  # nats, in float32: sums of other shapes of batches


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with serving("--dtype", "float32") as server:
        yield server


def post(server: LocalServer, path: str, **body: Any) -> Any:
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def get(server: LocalServer, path: str) -> Any:
    return httpx.get(f"{server.url}{path}", timeout=60).json()


def test_scores_of_a_prompt_are_the_same_cold_and_cached(server: LocalServer) -> None:
    ids = post(server, "/tokenize", prompt=TALE)["tokens"]
    httpx.post(f"{server.url}/flush_cache", timeout=60).raise_for_status()

    def scores(**fields: Any) -> tuple[list[float], list[str], int]:
        body = {"prompt": ids, "echo": True, "logprobs": 1, "temperature": 0, **fields}
        answer = post(server, "/v1/completions", **body)
        block = answer["choices"][0]["logprobs"]
        assert answer["choices"][0]["text"].startswith(TALE)
        assert len(block["tokens"]) == len(block["token_logprobs"]) == len(block["text_offset"])
        assert block["token_logprobs"][0] is None
        return block["token_logprobs"][1 : len(ids)], block["tokens"], answer["usage"]["completion_tokens"]

    cold, tokens, generated = scores(max_tokens=1)
    assert generated == 1
    assert "".join(tokens).startswith(TALE)
    again, _, _ = scores(max_tokens=1)
    nothing, _, generated = scores(max_tokens=0)
    assert generated == 0
    post(server, "/generate", input_ids=ids[:-5], sampling_params={"max_new_tokens": 1})
    after_generating, _, _ = scores(max_tokens=1)
    assert len(cold) == len(ids) - 1
    for warm in (again, nothing, after_generating):
        assert warm == pytest.approx(cold, abs=CLOSE)
    native = post(
        server,
        "/generate",
        input_ids=ids,
        return_logprob=True,
        logprob_start_len=0,
        sampling_params={"max_new_tokens": 1, "temperature": 0},
    )
    assert [row[0] for row in native["meta_info"]["input_token_logprobs"]][1:] == pytest.approx(cold, abs=CLOSE)


def test_score_is_the_probability_of_the_next_token(server: LocalServer) -> None:
    query, items = "The capital of France is", [" the city of", " called"]
    labels = post(server, "/tokenize", prompt=[" Paris", " London", " a"])["tokens"]
    labels = [label[0] for label in labels]
    answer = post(server, "/v1/score", query=query, items=items, label_token_ids=labels)
    for item, row in zip(items, answer["scores"], strict=True):
        native = post(
            server,
            "/generate",
            text=query + item,
            return_logprob=True,
            token_ids_logprob=labels,
            sampling_params={"max_new_tokens": 1, "temperature": 0},
        )
        [wanted] = native["meta_info"]["output_token_ids_logprobs"]
        assert row == pytest.approx([math.exp(logprob) for logprob, _, _ in wanted], abs=1e-4)
    shares = post(server, "/v1/score", query=query, items=items, label_token_ids=labels, apply_softmax=True)["scores"]
    assert [sum(row) for row in shares] == pytest.approx([1.0, 1.0])


def test_patterns_end_the_text(server: LocalServer) -> None:
    params: dict[str, Any] = {"max_new_tokens": 60, "temperature": 0, "ignore_eos": True}
    whole = post(server, "/generate", text=TALE, sampling_params=params)["text"]
    first = re.search("[a-z] [a-z]", whole)
    assert first is not None
    for trim in (True, False):
        fields = {**params, "stop_regex": ["[a-z] [a-z]", "never"], "no_stop_trim": not trim}
        answer = post(server, "/generate", text=TALE, sampling_params=fields)
        assert answer["text"] == whole[: first.start() if trim else first.end()]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "[a-z] [a-z]"}
        assert answer["meta_info"]["completion_tokens"] < 60


def test_a_session_goes_on_from_its_own_tokens(server: LocalServer) -> None:
    session = post(server, "/open_session", capacity_of_str_len=4000)
    params = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    first = post(server, "/generate", text=TALE, session_params={"id": session}, sampling_params=params)
    rid = first["meta_info"]["id"]
    second = post(
        server,
        "/generate",
        input_ids=[30],
        session_params={"id": session, "rid": rid},
        sampling_params=params,
        return_prompt_token_ids=True,
    )
    ids = post(server, "/tokenize", prompt=TALE)["tokens"]
    assert second["prompt_token_ids"] == [*ids, *first["output_ids"], 30]
    assert second["meta_info"]["cached_tokens"] >= len(ids) + 11  # the last sampled token has no KV yet
    alone = post(server, "/generate", input_ids=second["prompt_token_ids"], sampling_params=params)
    assert alone["output_ids"] == second["output_ids"]
    assert httpx.post(f"{server.url}/close_session", json={"session_id": session}, timeout=60).status_code == 200


def test_the_best_of_several(server: LocalServer) -> None:
    body = {"prompt": TALE, "max_tokens": 8, "temperature": 1.5, "seed": 3, "ignore_eos": True, "logprobs": 0}
    every = post(server, "/v1/completions", n=6, **body)["choices"]

    def mean(choice: dict[str, Any]) -> float:
        return sum(choice["logprobs"]["token_logprobs"]) / 8

    shown = post(server, "/v1/completions", n=2, best_of=6, **body)
    expected = sorted(every, key=mean, reverse=True)[:2]
    assert [choice["text"] for choice in shown["choices"]] == [choice["text"] for choice in expected]
    assert shown["usage"]["completion_tokens"] == 48


def test_pause_and_continue(server: LocalServer) -> None:
    body = {
        "text": TALE,
        "stream": True,
        "sampling_params": {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True},
    }
    undisturbed = post(server, "/generate", **{**body, "stream": False})["output_ids"]
    for mode in ("in_place", "retract"):
        ids: list[int] = []
        with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=120) as answer:
            events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
            ids = next(events)["output_ids"]
            post(server, "/pause_generation", mode=mode)
            if mode == "retract":
                assert eventually(lambda: get(server, "/v1/loads")["aggregate"]["num_running_reqs"] == 0)
            assert len(ids) < 40
            post(server, "/continue_generation")
            for event in events:
                ids = event["output_ids"]
        assert ids == undisturbed
