"""/v1/messages with the anthropic package: blocks, events, tools, counts, and errors in its own envelope."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest

from services.tokenizer.service import TokenizerService
from shared import ints
from shared.messages.request import RequestRejected
from shared.messages.stream import Finish, FinishReason
from tests.tokenizer.fake_backend import FakeBackend, Script
from tests.tokenizer.test_chat_tools import CALL, PARAMETERS, THOUGHT, Launcher, prompt_of, says

TOOL: Any = {"name": "weather", "description": "Of a city.", "input_schema": PARAMETERS}
MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def service(launch: Launcher) -> TokenizerService:
    return await launch(context_length=1600, reasoning_parser="qwen3")  # type: ignore[no-any-return]


@pytest.fixture
async def sdk(service: TokenizerService) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=service.url, api_key="none", max_retries=0) as client:
        yield client


async def test_text(sdk: anthropic.AsyncAnthropic, backend: FakeBackend) -> None:
    backend.cached_tokens = 3
    system: Any = [
        {"type": "text", "text": "Be ", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "kind."},
    ]
    answer = await sdk.messages.create(
        model="tiny", messages=MESSAGES, max_tokens=4, system=system, extra_body={"top_k": 5}
    )
    assert answer.id.startswith("msg_")
    assert answer.stop_reason == "max_tokens"
    assert answer.content[0].type == "text"
    assert answer.content[0].text
    prompt_tokens = ints.count(backend.requests[-1].prompt_ids)
    assert answer.usage.cache_read_input_tokens == 3
    assert answer.usage.input_tokens == prompt_tokens - 3
    assert answer.usage.output_tokens == 4
    assert prompt_of(backend) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    counted = await sdk.messages.count_tokens(model="tiny", messages=MESSAGES, system=system)
    assert counted.input_tokens == prompt_tokens


async def test_the_stream_of_events(sdk: anthropic.AsyncAnthropic, backend: FakeBackend) -> None:
    says(backend, f"{THOUGHT}\n{CALL}", size=4)
    stream = await sdk.messages.create(model="tiny", messages=MESSAGES, max_tokens=500, tools=[TOOL], stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    blocks = [event.content_block.type for event in events if event.type == "content_block_start"]
    assert blocks == ["thinking", "text", "tool_use"]
    order = [kind for kind in kinds if kind in ("content_block_start", "content_block_stop")]
    assert order == ["content_block_start", "content_block_stop"] * 3
    parts = [event.delta for event in events if event.type == "content_block_delta"]
    assert "".join(part.thinking for part in parts if part.type == "thinking_delta") == "hello is a greeting"
    assert "".join(part.text for part in parts if part.type == "text_delta") == "Good morning"
    written = "".join(part.partial_json for part in parts if part.type == "input_json_delta")
    assert json.loads(written) == {"city": "Pa ris"}
    end = events[-2]
    assert end.type == "message_delta"
    assert end.delta.stop_reason == "tool_use"
    assert end.usage.output_tokens > 0


async def test_the_stream_helper(sdk: anthropic.AsyncAnthropic, backend: FakeBackend) -> None:
    says(backend, "Good morning\n" + CALL, size=3)
    async with sdk.messages.stream(model="tiny", messages=MESSAGES, max_tokens=500, tools=[TOOL]) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final = await stream.get_final_message()
    assert text == "Good morning"
    assert final.content[-1].type == "tool_use"
    assert final.content[-1].input == {"city": "Pa ris"}


async def test_tools_and_their_results(sdk: anthropic.AsyncAnthropic, backend: FakeBackend) -> None:
    says(backend, "Let me look.\n" + CALL)
    first = await sdk.messages.create(
        model="tiny", messages=MESSAGES, max_tokens=500, tools=[TOOL], tool_choice={"type": "any"}
    )
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert call.type == "tool_use"
    constraint = backend.requests[-1].constraint
    assert constraint is not None
    assert json.loads(constraint.source)["format"]["type"] == "tags_with_separator"
    says(backend, "It is sunny.")
    content: Any = [
        {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]},
        {"type": "text", "text": "Well?"},
    ]
    history: Any = [*MESSAGES, {"role": "assistant", "content": first.content}, {"role": "user", "content": content}]
    second = await sdk.messages.create(model="tiny", messages=history, max_tokens=500, tools=[TOOL])
    assert second.stop_reason == "end_turn"
    prompt = prompt_of(backend)
    assert "assistant\nLet me look.\n<tool_call>" in prompt
    assert "user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n<|im_start|>user\nWell?<|im_end|>" in prompt


async def test_stop_sequences_and_an_answer_begun(sdk: anthropic.AsyncAnthropic, backend: FakeBackend) -> None:
    says(backend, "One", finish=Finish(FinishReason.STOP, matched_string="END"))
    begun: Any = [*MESSAGES, {"role": "assistant", "content": "I say:"}]
    answer = await sdk.messages.create(model="tiny", messages=begun, max_tokens=9, stop_sequences=["END"])
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "END")
    assert backend.requests[-1].stop_strings == ("END",)
    assert prompt_of(backend).endswith("<|im_start|>assistant\nI say:")


async def test_a_schema_for_the_answer(sdk: anthropic.AsyncAnthropic, backend: FakeBackend) -> None:
    says(backend, '{"a":1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    config: Any = {"format": {"type": "json_schema", "schema": schema}}
    await sdk.messages.create(model="tiny", messages=MESSAGES, max_tokens=99, output_config=config)
    constraint = backend.requests[-1].constraint
    assert constraint is not None
    assert (constraint.kind, json.loads(constraint.source)) == ("json_schema", schema)


async def test_thinking_reaches_the_template(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    body = {"messages": MESSAGES, "max_tokens": 5, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    assert (await client.post("/v1/messages", json=body)).status_code == 200
    body["thinking"] = {"type": "sometimes"}
    refused = (await client.post("/v1/messages", json=body)).json()
    assert "thinking.type" in refused["error"]["message"]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens is required"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"messages": []}, "messages is empty"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
    ({"system": [{"type": "image"}]}, "system[0]"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"name": "a", "input_schema": []}]}, "tools[0].input_schema"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "x"}}, "tool_choice.type"),
    ({"stop_sequences": [""]}, "stop_sequences must not hold an empty string"),
    ({"stop": "x"}, "stop cannot be honoured"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"temperature": -1}, "temperature"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ({"messages": [{"role": "user", "content": "hello " * 3000}]}, "longer than the maximum context length"),
]


async def test_bad_fields_are_refused_by_name(client: httpx.AsyncClient) -> None:
    for fields, told in BAD:
        answer = await client.post("/v1/messages", json={"messages": MESSAGES, "max_tokens": 5, **fields})
        assert answer.status_code == 400, answer.text
        body = answer.json()
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
        assert told in body["error"]["message"]
        assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_every_failure_has_the_envelope(sdk: anthropic.AsyncAnthropic, backend: FakeBackend) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as missing:
        await sdk.messages.create(model="other", messages=MESSAGES, max_tokens=4)
    assert missing.value.body == {
        "type": "error",
        "error": {"type": "not_found_error", "message": "The model 'other' does not exist."},
        "request_id": missing.value.request_id,
    }
    backend.reject = RequestRejected("", "queue_full", "too many requests are waiting", 1.0)
    with pytest.raises(anthropic.RateLimitError) as full:
        await sdk.messages.create(model="tiny", messages=MESSAGES, max_tokens=4)
    assert full.value.response.headers["retry-after"] == "1"
    place = "#/format/tags/0/content/elements/1/json_schema/properties/a/type"
    backend.reject = RequestRejected("", "bad_constraint", f"structural_tag: {place}: 'stuff' is no type")
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\].input_schema/properties/a/type: 'stuff'"):
        await sdk.messages.create(model="tiny", messages=MESSAGES, max_tokens=4, tools=[TOOL])


async def test_a_wrong_method_and_a_wrong_key(launch: Launcher) -> None:
    service = await launch(api_key="right-key-of-alice")
    async with httpx.AsyncClient(base_url=service.url) as client:
        key = {"x-api-key": "right-key-of-alice", "anthropic-version": "2023-06-01"}
        refused = await client.get("/v1/messages", headers=key)
        assert (refused.status_code, refused.json()["type"]) == (405, "error")
        body = {"messages": MESSAGES, "max_tokens": 2}
        wrong = await client.post("/v1/messages", json=body, headers={"x-api-key": "wrong"})
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
        assert (await client.post("/v1/messages", json=body, headers=key)).status_code == 200


async def test_a_failure_in_mid_stream(sdk: anthropic.AsyncAnthropic, backend: FakeBackend) -> None:
    failing = Script([270, 271], Finish(FinishReason.ERROR, message="the worker broke", status=500))
    failing.pause_after = 1
    backend.script = lambda request: failing
    stream = await sdk.messages.create(model="tiny", messages=MESSAGES, max_tokens=4, stream=True)
    with pytest.raises(anthropic.APIStatusError, match="the worker broke"):
        async for event in stream:
            if event.type == "content_block_delta":
                failing.resume.set()
