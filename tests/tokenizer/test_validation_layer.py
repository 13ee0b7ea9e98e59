"""One layer for all bodies: unknown fields at any depth, strictness, text that is none, ranges in the message."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.tokenizer.conftest import Launcher
from tests.tokenizer.fake_backend import FakeBackend
from tests.tokenizer.tiny_folder import VOCAB_SIZE

MESSAGES = [{"role": "user", "content": "hello", "extra": {"in": "a message"}}]
GOOD: dict[str, dict[str, Any]] = {
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 1}},
    "/script": {"prompt_parts": [{"text": "hello"}], "steps": [{"gen": {"sampling_params": {"max_new_tokens": 1}}}]},
    "/v1/completions": {"prompt": "hello", "max_tokens": 1},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": "hello", "max_output_tokens": 16},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1, "model": "tiny"},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hello"}], "model": "tiny"},
    "/v1/score": {"query": "hello", "items": ["world"], "label_token_ids": [5]},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5]},
    "/apply_chat_template": {"messages": MESSAGES},
    "/parse_function_call": {"text": "hello", "tools": [{"type": "function", "function": {"name": "f"}}]},
    "/separate_reasoning": {"text": "hello", "reasoning_parser": "qwen3"},
    "/open_session": {"capacity_of_str_len": 10},
    "/close_session": {"session_id": "open"},
    "/unpin": {"pin": "x"},
    "/abort_request": {"rid": "x"},
    "/pause_generation": {},
    "/continue_generation": {},
    "/configure_logging": {"log_requests": False},
}
WITHOUT_BODY = {"/flush_cache", "/v1/responses/{response_id}/cancel", "/workers/{worker_id}/drain"}
NESTED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("/generate", {"sampling_params": {"max_new_tokens": 1, "wobble": 2}}, ["sampling_params.wobble"]),
    ("/generate", {"wibble": 1, "sampling_params": {"wobble": 2}}, ["wibble", "sampling_params.wobble"]),
    ("/v1/completions", {"stream": True, "stream_options": {"wobble": None}}, ["stream_options.wobble"]),
    ("/v1/chat/completions", {"stream": True, "stream_options": {"a": 1, "b": {"c": 2}}}, ["stream_options.a"]),
]
HEADER = "x-radixfleet-ignored"


@pytest.fixture
async def strict(launch: Launcher) -> AsyncIterator[httpx.AsyncClient]:
    service = await launch(strict_fields=True)
    async with httpx.AsyncClient(base_url=service.url, timeout=20) as client:
        yield client


async def test_every_route_is_looked_at_here(client: httpx.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    posts = {path for path, operations in paths.items() if "post" in operations}
    assert posts - WITHOUT_BODY <= GOOD.keys()


async def test_unknown_fields_are_listed_on_every_route(client: httpx.AsyncClient) -> None:
    for path, body in GOOD.items():
        await client.post("/open_session", json={"capacity_of_str_len": 9, "session_id": "open"})
        answer = await client.post(path, json={**body, "wibble": 1, "wobble": None})
        if answer.status_code == 404:
            continue  # not among the routes: the test above says so
        assert answer.status_code == 200, (path, answer.text)
        assert answer.headers.get(HEADER) == "wibble, wobble", path
        await client.post("/open_session", json={"capacity_of_str_len": 9, "session_id": "open"})
        assert HEADER not in (await client.post(path, json=body)).headers


async def test_strictness_refuses_them_on_every_route(strict: httpx.AsyncClient) -> None:
    for path, body in GOOD.items():
        await strict.post("/open_session", json={"capacity_of_str_len": 9, "session_id": "open"})
        answer = await strict.post(path, json={**body, "wibble": 1, "wobble": None})
        if answer.status_code == 404:
            continue
        assert answer.status_code == 400, (path, answer.text)
        error = answer.json()["error"]
        assert error.get("param", "wibble") == "wibble"
        assert error.get("code", "unknown_parameter") == "unknown_parameter"
        assert "wibble, wobble" in error["message"]
        assert (await strict.post(path, json=body)).status_code == 200, path


@pytest.mark.parametrize(("path", "fields", "names"), NESTED)
async def test_unknown_fields_inside_others(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any], names: list[str]
) -> None:
    answer = await client.post(path, json={**GOOD[path], **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers[HEADER].startswith(", ".join(names))


@pytest.mark.parametrize(("path", "fields", "names"), NESTED)
async def test_strictness_looks_inside(
    strict: httpx.AsyncClient, backend: FakeBackend, path: str, fields: dict[str, Any], names: list[str]
) -> None:
    answer = await strict.post(path, json={**GOOD[path], **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in names
    assert backend.requests == []


async def test_many_unknown_fields_make_a_short_header(client: httpx.AsyncClient, capsys: Any) -> None:
    body = {**GOOD["/generate"], **{f"field_{i}" + "x" * 200: i for i in range(3000)}}
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 200
    assert len(answer.headers[HEADER]) < 4096
    said = capsys.readouterr()
    assert (said.out + said.err).count("unknown field ignored") <= 64
    await client.post("/generate", json=body)
    said = capsys.readouterr()
    assert "unknown field ignored" not in said.out + said.err  # once each


@pytest.mark.parametrize("stream", [False, True])
async def test_half_characters_are_no_text(client: httpx.AsyncClient, backend: FakeBackend, stream: bool) -> None:
    half = "\\ud83d"
    bodies = {
        "/generate": [f'{{"text": "{half}"', f'{{"text": ["a", "b{half}"]', f'{{"text": "a", "rid": "{half}"'],
        "/v1/completions": [f'{{"prompt": "a{half}b"', f'{{"prompt": "a", "stop": ["{half}"]'],
        "/v1/chat/completions": [
            f'{{"messages": [{{"role": "user", "content": "{half}"}}]',
            f'{{"messages": [{{"role": "user", "content": [{{"type": "text", "text": "{half}"}}]}}]',
        ],
        "/tokenize": [f'{{"prompt": "{half}"'],
    }
    for path, starts in bodies.items():
        for start in starts:
            end = f', "stream": {json.dumps(stream)}}}' if path != "/tokenize" else "}"
            headers = {"content-type": "application/json"}
            answer = await client.post(path, content=(start + end).encode(), headers=headers)
            assert answer.status_code == 400, (path, start, answer.text)
            assert answer.json()["error"]["code"] == "invalid_json"
    raw = b'{"text": "\xed\xa0\xbd"}'  # the same as bytes
    answer = await client.post("/generate", content=raw, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert backend.requests == []


async def test_ranges_are_in_the_message(client: httpx.AsyncClient) -> None:
    for path, body, param in (
        ("/v1/completions", {"prompt": "x", "top_k": 10**7}, "top_k"),
        ("/v1/completions", {"prompt": "x", "top_k": -5}, "top_k"),
        ("/generate", {"text": "x", "sampling_params": {"top_k": 0}}, "sampling_params.top_k"),
    ):
        error = (await client.post(path, json=body)).json()["error"]
        assert (error["param"], error["code"]) == (param, "out_of_range")
        assert f"1 to {VOCAB_SIZE}" in error["message"]
        assert "-1" in error["message"]


async def test_text_and_ids_together_are_said_clearly(client: httpx.AsyncClient) -> None:
    error = (await client.post("/generate", json={"text": "x", "input_ids": [1]})).json()["error"]
    assert error["param"] in ("text", "input_ids")
    assert "text" in error["message"]
    assert "input_ids" in error["message"]
    assert "together" in error["message"]
    error = (await client.post("/generate", json={})).json()["error"]
    assert error["code"] == "missing_required_parameter"
