"""What the door refuses, and how: one envelope, the right status, the field at fault."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from shared.messages.request import RequestRejected
from tests.tokenizer.conftest import Launcher
from tests.tokenizer.fake_backend import FakeBackend, Script
from tests.tokenizer.tiny_folder import CONTEXT, VOCAB_SIZE

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": MESSAGES, **fields}


def complete(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": "hello", **fields}


def generate(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"text": "hello", **fields}


def sampled(**fields: Any) -> tuple[str, dict[str, Any]]:
    return generate(sampling_params=fields)


SCHEMA_PATH = "response_format.json_schema.schema"
TOO_LONG = "hello " * (CONTEXT + 40)
BAD: list[tuple[tuple[str, dict[str, Any]], str | None, str | None]] = [
    # request, parameter, code
    (chat(model="gpt-4"), "model", "model_not_found"),
    (chat(messages=[]), "messages", "empty_prompt"),
    (chat(messages="hello"), "messages", "invalid_type"),
    ((CHAT, {}), "messages", "missing_required_parameter"),
    (chat(messages=[{"role": "wizard", "content": "x"}]), "messages[0].role", "invalid_value"),
    (chat(messages=[{"role": "user"}]), "messages[0].content", "missing_required_parameter"),
    (chat(messages=[{"role": "user", "content": None}]), "messages[0].content", "missing_required_parameter"),
    (chat(messages=[{"role": "user", "content": 5}]), "messages[0].content", "invalid_type"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        "messages[0].content[0]",
        "invalid_value",
    ),
    (chat(messages=[{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text", "invalid_type"),
    (chat(messages=[{"role": "user", "content": TOO_LONG}]), "messages", "context_length_exceeded"),
    (chat(temperature=-1), "temperature", "out_of_range"),
    (chat(temperature="hot"), "temperature", "invalid_type"),
    (chat(top_p=0), "top_p", "out_of_range"),
    (chat(top_p=1.1), "top_p", "out_of_range"),
    (chat(top_k=0), "top_k", "out_of_range"),
    (chat(top_k=10**7), "top_k", "out_of_range"),
    (chat(top_k=-5), "top_k", "out_of_range"),
    (chat(min_p=2), "min_p", "out_of_range"),
    (chat(frequency_penalty=3), "frequency_penalty", "out_of_range"),
    (chat(presence_penalty=-3), "presence_penalty", "out_of_range"),
    (chat(repetition_penalty=0), "repetition_penalty", "out_of_range"),
    (chat(n=0), "n", "out_of_range"),
    (chat(n=10**6), "n", "out_of_range"),
    (chat(n=True), "n", "invalid_type"),
    (chat(seed=2**64), "seed", "out_of_range"),
    (chat(seed=1.5), "seed", "invalid_type"),
    (chat(max_tokens=-1), "max_tokens", "out_of_range"),
    (chat(max_completion_tokens=-1), "max_completion_tokens", "out_of_range"),
    (chat(max_completion_tokens=9, max_tokens=6), "max_completion_tokens", "invalid_value"),
    (chat(stop=[""]), "stop", "invalid_value"),
    (chat(stop=["x"] * 100), "stop", "out_of_range"),
    (chat(stop=["x" * 5000]), "stop", "out_of_range"),
    (chat(stop=5), "stop", "invalid_type"),
    (chat(logprobs=True, top_logprobs=1000), "top_logprobs", "out_of_range"),
    (chat(top_logprobs=2), "top_logprobs", "invalid_value"),
    (chat(stream_options={"include_usage": True}), "stream_options", "invalid_value"),
    (chat(logit_bias={str(VOCAB_SIZE): 1}), "logit_bias", "out_of_range"),
    (chat(logit_bias={"-1": 1}), "logit_bias", "out_of_range"),
    (chat(logit_bias={"x": 1}), "logit_bias", "invalid_value"),
    (chat(logit_bias={"1": 101}), "logit_bias", "out_of_range"),
    (chat(stop_token_ids=[2**31]), "stop_token_ids", "out_of_range"),
    (chat(stop_token_ids=[-1]), "stop_token_ids", "out_of_range"),
    (chat(stop_token_ids=[True]), "stop_token_ids", "invalid_type"),
    (chat(rid=""), "rid", "invalid_value"),
    (chat(rid="x" * 500), "rid", "invalid_value"),
    (chat(chat_template="{{ 1 }}"), "chat_template", "unsupported_parameter"),
    (chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "invalid_value"),
    (chat(continue_final_message=True), "continue_final_message", None),
    (chat(guided_whitespace_pattern=" "), "guided_whitespace_pattern", "unsupported_parameter"),
    (chat(guided_regex="a+", guided_choice=["b"]), "guided_choice", "invalid_value"),
    (chat(regex="a+", ebnf="root ::= 'a'"), "ebnf", "invalid_value"),
    (chat(regex="a+", response_format={"type": "json_object"}), "response_format", "invalid_value"),
    (chat(regex="a+", best_effort=True, stop=["x"]), "best_effort", "invalid_value"),
    (chat(regex="a+", best_effort=True, stop_regex="b"), "best_effort", "invalid_value"),
    (chat(best_effort=True), "best_effort", "invalid_value"),
    (chat(regex="a+", any_whitespace=True), "any_whitespace", "invalid_value"),
    (chat(complete_within_budget=True), "complete_within_budget", "invalid_value"),
    (chat(response_format={"type": "xml"}), "response_format.type", "invalid_value"),
    (chat(response_format={"type": "json_schema"}), SCHEMA_PATH, "missing_required_parameter"),
    (chat(response_format={"type": "json_object", "a": 1}), "response_format.a", "unsupported_parameter"),
    (chat(structured_outputs={"regex": ["a"]}), "structured_outputs.regex", "invalid_type"),
    (chat(structured_outputs={"backend": "x"}), "structured_outputs.backend", "unsupported_parameter"),
    (chat(tools=[{"type": "function", "function": {"name": "a b"}}]), "tools[0].function.name", "invalid_value"),
    (chat(tool_choice="required"), "tool_choice", "invalid_value"),
    (chat(lora_path="x"), "lora_path", "unsupported_parameter"),
    (chat(stop_regex="(a|b)*"), "stop_regex", "invalid_value"),
    (complete(prompt=""), "prompt", "empty_prompt"),
    (complete(prompt=[""]), "prompt", "empty_prompt"),
    (complete(prompt=[]), "prompt", "empty_prompt"),
    (complete(prompt=[[]]), "prompt", "empty_prompt"),
    (complete(prompt=["a", 1]), "prompt", "invalid_type"),
    (complete(prompt=[-1]), "prompt", "out_of_range"),
    (complete(prompt=[VOCAB_SIZE]), "prompt", "out_of_range"),
    (complete(prompt=[2**63]), "prompt", "out_of_range"),
    (complete(prompt=[1.5]), "prompt", "invalid_type"),
    (complete(prompt=[True]), "prompt", "invalid_type"),
    (complete(prompt=TOO_LONG), "prompt", "context_length_exceeded"),
    (complete(prompt="x" * (1 << 20)), "prompt", "context_length_exceeded"),
    (complete(best_of=3, n=4), "best_of", "out_of_range"),
    (complete(suffix="x"), "suffix", "unsupported_parameter"),
    (complete(logprobs=1000), "logprobs", "out_of_range"),
    (complete(json_schema=3), "json_schema", "invalid_type"),
    (complete(choice="a"), "choice", "invalid_type"),
    (complete(prompt=["a"] * 600), "n", "out_of_range"),
    (("/generate", {}), "text", "missing_required_parameter"),
    (generate(input_ids=[1]), "input_ids", "invalid_value"),
    (("/generate", {"input_ids": []}), "input_ids", "empty_prompt"),
    (("/generate", {"input_ids": [[]]}), "input_ids", "empty_prompt"),
    (("/generate", {"input_ids": [2**63]}), "input_ids", "out_of_range"),
    (("/generate", {"input_ids": [1] * CONTEXT}), "input_ids", "context_length_exceeded"),
    (generate(text=""), "text", "empty_prompt"),
    (generate(return_logprob=True, logprob_start_len=500), "logprob_start_len", "out_of_range"),
    (generate(return_logprob=True, token_ids_logprob=[VOCAB_SIZE]), "token_ids_logprob", "out_of_range"),
    (generate(return_logprob=True, top_logprobs_num=1000), "top_logprobs_num", "out_of_range"),
    (generate(text=["a", "b"], rid=["x"]), "rid", "invalid_value"),
    (generate(text=["a", "b"], rid=["x", "x"]), "rid", "duplicate_id"),
    (generate(text=["a", "b"], sampling_params=[{}]), "sampling_params", "invalid_value"),
    (generate(text=["a", "b"], sampling_params=[{"n": 1}, {"n": 2}]), "sampling_params.n", "invalid_value"),
    (sampled(regex=1), "sampling_params.regex", "invalid_type"),
    (sampled(json_schema="{}", lark="x"), "sampling_params.lark", "invalid_value"),
    (sampled(jump_forward=True), "sampling_params.jump_forward", "invalid_value"),
    (sampled(temperature=-1), "sampling_params.temperature", "out_of_range"),
    (sampled(max_new_tokens=-1), "sampling_params.max_new_tokens", "out_of_range"),
    (sampled(max_new_tokens="x"), "sampling_params.max_new_tokens", "invalid_type"),
    (sampled(sampling_seed="x"), "sampling_params.sampling_seed", "invalid_type"),
    (sampled(sampling_seed=1, seed=2), "sampling_params", None),
    (generate(image_data="http://x"), "image_data", "unsupported_parameter"),
    (generate(input_embeds=[[1.0]]), "input_embeds", "unsupported_parameter"),
    (generate(session_params={"id": "x"}), "session_params.id", "session_not_found"),
    (generate(templated=True), "templated", "invalid_value"),
    (("/generate", {"prompt_parts": []}), "prompt_parts", "empty_prompt"),
    (("/generate", {"prompt_parts": [{"text": TOO_LONG}]}), "prompt_parts", "context_length_exceeded"),
    (("/generate", {"prompt_parts": [{"text": "x"}], "parse_special": False}), "parse_special", "invalid_value"),
    (sampled(logit_bias={"5": 1, "05": 2}), "sampling_params.logit_bias", "invalid_value"),
    (("/tokenize", {"prompt": 5}), "prompt", "invalid_type"),
    (("/detokenize", {"tokens": [VOCAB_SIZE]}), "tokens", "out_of_range"),
    (("/abort_request", {}), "rid", "missing_required_parameter"),
]


@pytest.fixture
async def door(launch: Launcher, backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    service = await launch(max_body_bytes=2 << 20)
    async with httpx.AsyncClient(base_url=service.url, timeout=20) as client:
        yield client
    assert not len(service.context.frontend.streams)


async def test_every_refusal_names_its_field(door: httpx.AsyncClient, backend: FakeBackend) -> None:
    for (path, body), param, code in BAD:
        for stream in (False, True) if path not in ("/tokenize", "/detokenize", "/abort_request") else (False,):
            if stream and "stream_options" in body:
                continue
            sent = {**body, "stream": stream} if stream else body
            answer = await door.post(path, content=json.dumps(sent), headers={"content-type": "application/json"})
            about = f"{path} {str(body)[:200]} -> {answer.status_code} {answer.text[:300]}"
            assert answer.status_code == (404 if code == "model_not_found" else 400), about
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}, about
            assert error["type"] == "invalid_request_error", about
            assert error["message"], about
            if param is not None:
                assert error["param"] == param, about
            if code is not None:
                assert error["code"] == code, about
    assert backend.requests == []


async def test_both_numbers_of_a_length_error(door: httpx.AsyncClient) -> None:
    ids = [1] * (CONTEXT + 1)
    answer = await door.post("/generate", json={"input_ids": ids})
    message = answer.json()["error"]["message"]
    assert str(CONTEXT + 1) in message
    assert str(CONTEXT) in message


async def test_bounds_are_told_to_the_digit(door: httpx.AsyncClient) -> None:
    message = (await door.post(CHAT, json=chat(priority=2**31)[1])).json()["error"]["message"]
    assert message == "priority must be at least -2147483648 and at most 2147483647, not 2147483648."


async def test_bodies_that_are_no_requests(door: httpx.AsyncClient) -> None:
    json_type = {"content-type": "application/json"}
    bad_name = b'{"text": "x", "session_params": {"i\xea": 1}}'
    for content in (
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"x"',
        b"\xff\xfe",
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        bad_name,
    ):
        answer = await door.post("/generate", content=content, headers=json_type)
        assert answer.status_code == 400, (content[:20], answer.text)
        assert answer.json()["error"]["type"] == "invalid_request_error"
    deep = b'{"messages": [{"role": "user", "content": "x", "y": ' + b"[" * 900 + b"]" * 900 + b"}]}"
    answer = await door.post(CHAT, content=deep, headers=json_type)
    assert answer.status_code == 400
    answer = await door.post("/generate", content=b"{}", headers={"content-type": "text/plain"})
    assert answer.status_code == 400
    assert "application/json" in answer.json()["error"]["message"]
    answer = await door.post("/generate", content=b" " * (3 << 20), headers=json_type)
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"

    async def unknown_length() -> AsyncIterator[bytes]:
        for _ in range(40):
            yield b" " * (1 << 16)

    answer = await door.post("/generate", content=unknown_length(), headers=json_type)
    assert answer.status_code == 413


async def test_unknown_routes_and_methods(door: httpx.AsyncClient) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/generate", 405),
        ("DELETE", CHAT, 405),
        ("GET", "/v1/models/other", 404),
        ("POST", CHAT + "/", 404),  # no redirect to wherever the Host header says
        ("GET", "/health/", 404),
    ):
        answer = await door.request(method, path)
        assert answer.status_code == status, path
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert error["code"] == {404: "not_found", 405: "method_not_allowed"}[status] or error["param"] == "model"


async def test_a_wrong_method_is_told_all_right_ones(door: httpx.AsyncClient) -> None:
    for path, allowed in (
        ("/generate", "POST, PUT"),
        ("/flush_cache", "GET, POST"),
        ("/v1/responses/resp_1", "GET, DELETE"),
        ("/health", "GET, HEAD"),
        ("/v1/models", "GET"),
        (CHAT, "POST"),
    ):
        answer = await door.request("PATCH", path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed), path


async def test_unknown_fields_are_listed(door: httpx.AsyncClient) -> None:
    body = {**generate()[1], "wibble": 1, "sampling_params": {"wobble": 2, "max_new_tokens": 1}}
    answer = await door.post("/generate", json=body)
    assert answer.status_code == 200
    assert answer.headers["x-radixfleet-ignored"] == "wibble, sampling_params.wobble"
    answer = await door.post(CHAT, json={**chat(max_tokens=1)[1], "böse\r\nx": 1})
    assert answer.status_code == 200
    assert answer.headers["x-radixfleet-ignored"] == r"b\xf6se\r\nx"
    answer = await door.post(CHAT, json={**chat(max_tokens=1)[1], **{f"x{i:02},": 1 for i in range(40)}})
    listed = answer.headers["x-radixfleet-ignored"].split(", ")
    assert listed == [*(rf"x{i:02}\x2c" for i in range(32)), "..."]
    opened = await door.post("/open_session", json={"capacity_of_str_len": 100})
    body = {**generate()[1], "session_params": {"id": opened.json(), "wubble": 1}}
    answer = await door.post("/generate", json=body)
    assert (answer.status_code, answer.headers["x-radixfleet-ignored"]) == (200, "session_params.wubble")
    answer = await door.post(CHAT, json=chat(max_tokens=1, user="me", stop=None, logit_bias=None, tools=[])[1])
    assert "x-radixfleet-ignored" not in answer.headers


async def test_neutral_values_of_refused_fields_are_fine(door: httpx.AsyncClient) -> None:
    fields: dict[str, Any] = {
        "regex": None,
        "lora_path": None,
        "return_hidden_states": False,
        "lora_id": "",
        "tools": [],
    }
    answer = await door.post(CHAT, json=chat(max_tokens=1, tool_choice="auto", **fields)[1])
    assert answer.status_code == 200, answer.text


async def test_rejections_of_the_scheduler(door: httpx.AsyncClient, backend: FakeBackend) -> None:
    expected = {
        "queue_full": (429, "rate_limit_error", "queue_full"),
        "too_long": (400, "invalid_request_error", "context_length_exceeded"),
        "no_worker": (503, "server_error", "no_worker"),
        "draining": (503, "server_error", "draining"),
        "duplicate_id": (400, "invalid_request_error", "duplicate_id"),
        "bad_constraint": (400, "invalid_request_error", "bad_constraint"),
        "internal": (500, "server_error", "internal_error"),
    }
    for code, (status, kind, name) in expected.items():
        backend.reject = RequestRejected("", code, "because", 7.0)  # type: ignore[arg-type]
        for stream in (False, True):
            answer = await door.post(CHAT, json=chat(stream=stream)[1])
            assert answer.status_code == status
            error = answer.json()["error"]
            assert (error["type"], error["code"], error["message"]) == (kind, name, "because")
            assert answer.headers.get("retry-after") == ("7" if status in (429, 503) else None)
    assert backend.aborted == []


async def test_request_ids_are_echoed(door: httpx.AsyncClient) -> None:
    answer = await door.get("/health", headers={"x-request-id": "abc-1"})
    assert answer.headers["x-request-id"] == "abc-1"
    answer = await door.get("/nothing", headers={"x-request-id": "x" * 1000})
    assert len(answer.headers["x-request-id"]) == 32


async def test_too_many_at_once(launch: Launcher, backend: FakeBackend) -> None:
    service = await launch(max_concurrent_requests=1)
    held = Script([5])
    held.gate = asyncio.Event()
    backend.script = lambda request: held
    async with httpx.AsyncClient(base_url=service.url, timeout=20) as client:
        first = asyncio.ensure_future(client.post("/generate", json=generate()[1]))
        await backend.until(lambda: backend.requests)
        answer = await client.post("/generate", json=generate()[1])
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        assert (await client.get("/health")).status_code == 200
        held.gate.set()
        assert (await first).status_code == 200
