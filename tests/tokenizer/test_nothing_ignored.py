"""What a request asks for and cannot have is said: in a refusal that has a code, or in the header of ignored fields."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest

from tests.tokenizer.conftest import Launcher
from tests.tokenizer.fake_backend import FakeBackend

CHAT = "/v1/chat/completions"
HEADER = "x-radixfleet-ignored"
MESSAGES = [{"role": "user", "content": "hello"}]
ONE = {"text": "hello", "sampling_params": {"max_new_tokens": 1}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES, "web_search_options": {}}),
        (CHAT, {"messages": MESSAGES, "modalities": ["text", "audio"]}),
        (CHAT, {"messages": MESSAGES, "session_params": {"id": "x", "rid": "y"}}),
        ("/v1/responses", {"input": "hello", "session_params": {"id": "x"}}),
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 1, "session_params": {"id": "x"}}),
    ],
)
async def test_what_cannot_be_had_is_refused(
    client: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    answer = await client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert list(body)[-1] in answer.json()["error"]["message"]
    assert not backend.requests


async def test_an_absent_wish_is_no_wish(client: httpx.AsyncClient) -> None:
    for value in (None, False):
        body = {"messages": MESSAGES, "max_tokens": 1, "web_search_options": value, "session_params": None}
        body["modalities"] = ["text"]  # what every model can
        answer = await client.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text


async def test_which_logprobs_without_logprobs_is_listed(client: httpx.AsyncClient) -> None:
    wishes: dict[str, Any] = {"top_logprobs_num": 2, "token_ids_logprob": [5], "return_text_in_logprobs": True}
    answer = await client.post("/generate", json={**ONE, **wishes})
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER] == ", ".join(wishes)
    answer = await client.post("/generate", json={**ONE, **wishes, "return_logprob": True})
    assert HEADER not in answer.headers
    absent = {"top_logprobs_num": 0, "token_ids_logprob": [], "return_text_in_logprobs": False}
    assert HEADER not in (await client.post("/generate", json={**ONE, **absent})).headers
    mixed = {"text": ["a", "b"], "return_logprob": [False, True], "top_logprobs_num": 2}
    assert HEADER not in (await client.post("/generate", json={**ONE, **mixed})).headers


async def test_strictness_refuses_it(launch: Launcher) -> None:
    service = await launch(strict_fields=True)
    async with httpx.AsyncClient(base_url=service.url, timeout=20) as strict:
        answer = await strict.post("/generate", json={**ONE, "top_logprobs_num": 2})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "top_logprobs_num needs return_logprob = true.",
        "type": "invalid_request_error",
        "param": "top_logprobs_num",
        "code": "invalid_value",
    }


async def test_a_compressed_body_is_refused_as_such(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = await client.post("/generate", content=gzip.compress(json.dumps(ONE).encode()), headers=headers)
    assert answer.status_code == 415
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("content-encoding", "unsupported_content_encoding")
    headers["content-encoding"] = "Identity"
    answer = await client.post("/generate", content=json.dumps(ONE), headers=headers)
    assert answer.status_code == 200


async def test_every_refusal_has_a_code(client: httpx.AsyncClient) -> None:
    for body, headers in (
        ({"continue_final_message": True}, {}),
        ({}, {"x-request-timeout": "soon"}),
        ({"chat_template_kwargs": {"tools": []}}, {}),
    ):
        answer = await client.post(CHAT, json={"messages": MESSAGES, **body}, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_value", answer.text
