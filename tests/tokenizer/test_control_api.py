"""Pause and continue, logging, loads and scores at the door."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from services.tokenizer.service import TokenizerService
from shared import ints
from shared.messages.request import GenerateRequest
from tests.tokenizer.fake_backend import FakeBackend, Script, scores_of


async def test_pause_and_continue_are_operations(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    for body, mode in (({}, "abort"), ({"mode": "retract"}, "retract"), ({"mode": "in_place"}, "in_place")):
        answer = await client.post("/pause_generation", json=body)
        assert answer.status_code == 200
        assert answer.json()["status"] == "ok"
        assert (backend.operations[-1].name, backend.operations[-1].argument) == ("pause", mode)
    for options in ({"json": {}}, {}):
        assert (await client.post("/continue_generation", **options)).json()["status"] == "ok"
        assert backend.operations[-1].name == "continue"
    wrong = await client.post("/pause_generation", json={"mode": "later"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "mode")


async def test_logging_is_changed_while_running(
    client: httpx.AsyncClient, backend: FakeBackend, service: TokenizerService
) -> None:
    measured = service.context.measurements
    assert not measured.log_requests
    assert (await client.post("/configure_logging", json={"log_requests": True})).status_code == 200
    assert measured.log_requests
    assert (await client.post("/configure_logging", json={"log_requests_level": 0})).status_code == 200
    assert not measured.log_requests
    assert (await client.post("/configure_logging", json={"log_level": "info"})).status_code == 200
    assert (backend.operations[-1].name, backend.operations[-1].argument) == ("set_log_level", "info")
    for body, param in (
        ({"log_level": "loud"}, "log_level"),
        ({"log_requests_level": 9}, "log_requests_level"),
        ({"dump_requests_folder": "/tmp"}, "dump_requests_folder"),
    ):
        wrong = await client.post("/configure_logging", json=body)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, param)


async def test_loads(client: httpx.AsyncClient) -> None:
    loads = (await client.get("/v1/loads")).json()
    assert loads["aggregate"]["max_total_num_tokens"] == 1600
    [worker] = loads["loads"]
    assert (worker["worker_id"], worker["num_used_tokens"], worker["num_cached_tokens"]) == ("w1", 320, 320)
    assert (await client.get("/ping")).status_code == 200


def scored(request: GenerateRequest) -> Script:
    script = Script([5])
    last = ints.unpack(request.prompt_ids)[-1]
    wanted = [math.log(0.5), math.log(0.25)] if last % 2 else [math.log(0.125), -math.inf]
    script.scores = lambda token: scores_of([(-1.0, [])], wanted)
    return script


@pytest.mark.parametrize("item_first", [False, True])
async def test_score(client: httpx.AsyncClient, backend: FakeBackend, item_first: bool) -> None:
    backend.script = scored
    body: dict[str, Any] = {"query": [1, 2, 3], "items": [[4, 7], [4, 8]], "label_token_ids": [10, 11]}
    answer = (await client.post("/v1/score", json={**body, "item_first": item_first})).json()
    assert (answer["object"], answer["model"]) == ("scoring", "tiny")
    assert answer["usage"]["prompt_tokens"] == 10
    prompts = sorted(ints.unpack(request.prompt_ids).tolist() for request in backend.requests)
    assert prompts == ([[4, 7, 1, 2, 3], [4, 8, 1, 2, 3]] if item_first else [[1, 2, 3, 4, 7], [1, 2, 3, 4, 8]])
    assert {request.sampling.max_tokens for request in backend.requests} == {1}
    assert ints.unpack(backend.requests[0].sampling.logprob_token_ids).tolist() == [10, 11]
    expected = [[0.5, 0.25], [0.5, 0.25]] if item_first else [[0.5, 0.25], [0.125, 0.0]]
    for row, wanted in zip(answer["scores"], expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-6)
    shares = (await client.post("/v1/score", json={**body, "item_first": True, "apply_softmax": True})).json()["scores"]
    assert shares[0] == pytest.approx([2 / 3, 1 / 3])


async def test_score_refuses(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    good: dict[str, Any] = {"query": "hello", "items": ["a"], "label_token_ids": [1]}
    for change, param in (
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [10**9]}, "label_token_ids"),
        ({"items": []}, "items"),
        ({"items": [[1]]}, "items"),
        ({"query": [], "items": [[]]}, "items"),
        ({"query": 5}, "query"),
        ({"items": ["x"] * 600}, "items"),
    ):
        answer = await client.post("/v1/score", json={**good, **change})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), change
    assert not backend.requests
