"""Tools and reasoning on /v1/chat/completions: what leaves for the engine and what comes back, with the real client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.tokenizer.service import TokenizerService
from shared import ints
from shared.messages.request import GenerateRequest, RequestRejected
from shared.messages.stream import Finish, FinishReason
from tests.tokenizer.fake_backend import FakeBackend, Script
from tests.tokenizer.tiny_folder import CHATML, write_model_folder

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": PARAMETERS}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Pa ris"}}\n</tool_call>'
STOP = Finish(FinishReason.STOP, matched_token=2)
Launcher = Callable[..., Any]


def says(backend: FakeBackend, text: str, size: int = 5, finish: Finish = STOP, ids: list[int] | None = None) -> None:
    """The engine's next answers: this text, a few characters with each token."""
    texts = [text[at : at + size] for at in range(0, len(text), size)] + [""]
    tokens = (ids or []) + [5] * (len(texts) - len(ids or []) - 1) + [2]
    backend.script = lambda request: Script(tokens, finish, texts)


@pytest.fixture
async def service(launch: Launcher) -> TokenizerService:
    """Tools make long prompts."""
    return await launch(context_length=1600)  # type: ignore[no-any-return]


@pytest.fixture
async def sdk(service: TokenizerService) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def prompt_of(backend: FakeBackend) -> str:
    ids = list(ints.unpack(backend.requests[-1].prompt_ids))
    return backend.tokenizer.decode(ids, skip_special_tokens=False)


async def test_a_call(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    says(backend, "Let me look.\n" + CALL)
    answer = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, tools=[TOOL])
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Pa ris"})
    prompt = prompt_of(backend)
    assert "Of a city." in prompt
    assert "<tool_call>" in prompt
    constraint = backend.requests[-1].constraint
    assert constraint is not None
    assert constraint.kind == "structural_tag"


async def test_streamed_calls_concatenate_to_json(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    says(backend, "Ok.\n" + CALL + "\n" + CALL.replace("Pa ris", "Rome"), size=3)
    stream = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, tools=[TOOL], stream=True)
    text, names, ids, arguments, ends = "", {}, {}, {}, []
    async for chunk in stream:
        [choice] = chunk.choices
        text += choice.delta.content or ""
        for delta in choice.delta.tool_calls or []:
            assert delta.function is not None
            if delta.id is not None:
                assert delta.index == len(names)
                names[delta.index], ids[delta.index] = delta.function.name, delta.id
            arguments[delta.index] = arguments.get(delta.index, "") + (delta.function.arguments or "")
        ends.append(choice.finish_reason)
    assert text == "Ok."
    assert list(names.values()) == ["weather", "weather"]
    assert len(set(ids.values())) == 2
    assert [json.loads(a) for a in arguments.values()] == [{"city": "Pa ris"}, {"city": "Rome"}]
    assert [end for end in ends if end] == ["tool_calls"]


async def test_the_stream_helper_of_the_client(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    says(backend, CALL)
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}
    async with sdk.chat.completions.stream(model="tiny", messages=MESSAGES, tools=[strict]) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    calls = final.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.parsed_arguments == {"city": "Pa ris"}


async def test_what_is_enforced(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    async def form(**fields: Any) -> dict[str, Any]:
        body = {"messages": MESSAGES, "tools": [TOOL, CLOCK], "max_tokens": 4, **fields}
        answer = await client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        constraint = backend.requests[-1].constraint
        assert constraint is not None
        return dict(json.loads(constraint.source)["format"])

    async def steered(**fields: Any) -> bool:
        await form(**fields)
        constraint = backend.requests[-1].constraint
        assert constraint is not None
        return constraint.complete_within_budget

    assert (await form())["type"] == "triggered_tags"
    assert not await steered()  # free text is cut where the budget ends, and says so
    assert await steered(tool_choice="required")
    assert await steered(response_format={"type": "json_object"})
    required = await form(tool_choice="required")
    assert (required["type"], len(required["tags"]), required["stop_after_first"]) == ("tags_with_separator", 2, False)
    assert (await form(tool_choice="required", parallel_tool_calls=False))["stop_after_first"] is True
    constraint = backend.requests[-1].constraint
    assert constraint is not None
    assert constraint.refuse_small_budget  # half a call is worth nothing
    named = await form(tool_choice={"type": "function", "function": {"name": "clock"}})
    assert len(named["tags"]) == 1
    both = await form(response_format={"type": "json_object"})
    assert [element["type"] for element in both["elements"]] == ["tags_with_separator", "json_schema"]
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "clock"}}]}
    assert len((await form(tool_choice={"type": "allowed_tools", "allowed_tools": allowed}))["tags"]) == 1


async def test_no_tools_are_used_with_none(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    says(backend, CALL)
    body = {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "none"}
    answer = (await client.post("/v1/chat/completions", json=body)).json()
    assert answer["choices"][0]["message"]["content"] == CALL
    assert backend.requests[-1].constraint is None
    assert "Of a city." not in prompt_of(backend)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [TOOL, {"type": "function"}]}, "tools[1].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
        "tools[0].function.parameters",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]},
        "tools[0].function.parameters.type",
    ),
    ({"tools": [TOOL] * 129}, "tools"),
    (
        {"tools": [{"type": "function", "function": {"name": "a", "description": "x" * 20000}}]},
        "tools[0].function.description",
    ),
    ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice.function.name",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "choice": ["a", "b"]}, "choice"),
    ({"tools": [TOOL], "tool_choice": "required", "regex": "a"}, "regex"),
    (
        {"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        "messages[1].tool_calls[0].function.name",
    ),
]


async def test_bad_tools_are_refused_by_name(client: httpx.AsyncClient) -> None:
    for fields, param in BAD:
        answer = await client.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


async def test_a_schema_the_compiler_refuses_is_told_by_its_tool(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    place = "#/format/tags/1/content/elements/1/json_schema/properties/a/type"
    backend.reject = RequestRejected("", "bad_constraint", f"structural_tag: {place}: 'stuff' is no type")
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="'stuff' is no type") as refused:
            await sdk.chat.completions.create(model="tiny", messages=MESSAGES, tools=[TOOL, CLOCK], stream=stream)
        assert refused.value.param == "tools[1].function.parameters"
        assert "properties/a/type" in refused.value.message
    small = "structural_tag: a complete text takes at least 23 tokens, but max_new_tokens is 8"
    backend.reject = RequestRejected("", "bad_constraint", small)
    with pytest.raises(openai.BadRequestError, match="at least 23 tokens, but max_tokens is 8") as refused:
        await sdk.chat.completions.create(model="tiny", messages=MESSAGES, tools=[TOOL], tool_choice="required")
    assert refused.value.param == "max_tokens"


async def test_history_in_plain_words(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """A template without tools sees calls as the assistant's words, results as the user's."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call, call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "rain"}]},
    ]
    body = {"messages": history, "tools": [TOOL], "max_tokens": 2}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    prompt = prompt_of(backend)
    assert '{"name": "weather", "arguments": {"city": "Rome"}}' in prompt
    results = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
    assert f"<|im_start|>user\n{results}<|im_end|>" in prompt
    assert "<|im_start|>tool" not in prompt


AWARE = "{% if tools %}{{ 'TOOLS ' + (tools | tojson) + '\n' }}{% endif %}" + CHATML.replace(
    "message['content']",
    "message['content'] + (message.tool_calls[0].function.arguments.city if message.tool_calls else '')",
)


async def test_a_template_that_knows_tools(launch: Launcher, backend: FakeBackend, tmp_path: Path) -> None:
    service = await launch(model_path=str(write_model_folder(tmp_path / "m", AWARE)), context_length=1600)
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "sunny"}]
    async with httpx.AsyncClient(base_url=service.url, timeout=20) as client:
        body = {"messages": history, "tools": [TOOL], "max_tokens": 2}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    prompt = prompt_of(backend)
    assert prompt.startswith('TOOLS [{"type": "function", "function": {"name": "weather"')
    assert "<|im_start|>tool\nsunny" in prompt
    assert "<|im_start|>assistant\nRome" in prompt
    assert "<tool_response>" not in prompt


async def test_cut_by_length_is_no_finished_call(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    says(backend, CALL[:40], finish=Finish(FinishReason.LENGTH))
    answer = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, tools=[TOOL])
    assert answer.choices[0].finish_reason == "length"


# Reasoning

THOUGHT = "<think>\nhello is a greeting\n</think>\n\nGood morning"


async def test_reasoning_is_separated(launch: Launcher, backend: FakeBackend) -> None:
    service = await launch(reasoning_parser="qwen3", context_length=1600)
    async with httpx.AsyncClient(base_url=service.url, timeout=20) as client:
        says(backend, THOUGHT)
        body: dict[str, Any] = {"messages": MESSAGES}
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        message = answer["choices"][0]["message"]
        assert message["reasoning_content"] == "hello is a greeting"
        assert message["content"] == "Good morning"
        assert (
            0 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] < answer["usage"]["completion_tokens"]
        )
        body["separate_reasoning"] = False
        answer = (await client.post("/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["message"]["content"] == THOUGHT


async def test_reasoning_streams_before_the_content(launch: Launcher, backend: FakeBackend) -> None:
    service = await launch(reasoning_parser="qwen3", context_length=1600)
    says(backend, THOUGHT, size=4)
    async with openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="none") as sdk:
        for stream_reasoning in (True, False):
            stream = await sdk.chat.completions.create(
                model="tiny", messages=MESSAGES, stream=True, extra_body={"stream_reasoning": stream_reasoning}
            )
            deltas = [chunk.choices[0].delta.to_dict() async for chunk in stream]
            thoughts = [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta]
            words = [delta["content"] for delta in deltas if delta.get("content")]
            assert "".join(map(str, thoughts)) == "hello is a greeting"
            assert "".join(map(str, words)) == "Good morning"
            assert (len(thoughts) > 1) == stream_reasoning


async def test_the_grammar_waits_for_the_end_of_the_reasoning(
    launch: Launcher, backend: FakeBackend, tmp_path: Path
) -> None:
    folder = thinking_folder(tmp_path)
    service = await launch(model_path=str(folder), reasoning_parser="qwen3", context_length=1600)
    begin, end = think_ids(folder)
    async with httpx.AsyncClient(base_url=service.url, timeout=20) as client:

        async def ask(**fields: Any) -> GenerateRequest:
            body = {"messages": MESSAGES, "max_tokens": 20, **fields}
            answer = await client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            return backend.requests[-1]

        free = await ask()
        assert free.thinking_end_id == -1
        assert begin not in ints.unpack(free.prompt_ids)
        held = await ask(regex="[0-9]+")
        assert held.thinking_end_id == end
        assert list(ints.unpack(held.prompt_ids)) == [*ints.unpack(free.prompt_ids), begin]
        off = await ask(regex="[0-9]+", chat_template_kwargs={"enable_thinking": False})
        assert off.thinking_end_id == -1
        assert (await ask(tools=[TOOL])).thinking_end_id == end
        says(backend, "so\n</think>\n\n12")
        answer = await client.post("/v1/chat/completions", json={"messages": MESSAGES, "regex": "[0-9]+"})
        message = answer.json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("so", "12")


SWITCHED = CHATML.replace(
    "{{ '<|im_start|>assistant\n' }}",
    "{{ '<|im_start|>assistant\n' }}{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}",
)


def thinking_folder(tmp_path: Path) -> Path:
    """A model with tokens for its reasoning and a template that can switch it off."""
    from tokenizers import AddedToken, Tokenizer

    folder = write_model_folder(tmp_path / "thinker", SWITCHED)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def think_ids(folder: Path) -> tuple[int, int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.token_to_id("<think>"), tokenizer.token_to_id("</think>")


async def test_texts_are_read_without_generating(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    body: dict[str, Any] = {"text": f"Look.\n{CALL}", "tools": [CLOCK, TOOL]}
    found = (await client.post("/parse_function_call", json=body)).json()
    assert found["normal_text"] == "Look."
    [call] = found["calls"]
    assert (call["tool_index"], call["name"], json.loads(call["parameters"])) == (1, "weather", {"city": "Pa ris"})
    refused = await client.post("/parse_function_call", json={**body, "tool_call_parser": "none"})
    assert refused.json()["error"]["param"] == "tool_call_parser"
    found = await client.post("/separate_reasoning", json={"text": THOUGHT, "reasoning_parser": "qwen3"})
    assert found.json() == {"reasoning_text": "hello is a greeting", "text": "Good morning"}
    refused = await client.post("/separate_reasoning", json={"text": THOUGHT})
    assert refused.json()["error"]["param"] == "reasoning_parser"
    assert backend.requests == []


async def test_the_developer_role_and_the_effort(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    """A template that does not know the role `developer` sees a system message."""
    told = [{"role": "developer", "content": "Be kind."}, *MESSAGES]
    body = {"messages": told, "max_tokens": 2, "reasoning_effort": "low"}
    assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert prompt_of(backend).startswith("<|im_start|>system\nBe kind.<|im_end|>")
    refused = await client.post("/v1/chat/completions", json={**body, "reasoning_effort": "lots"})
    assert refused.json()["error"]["param"] == "reasoning_effort"


async def test_no_effort_switches_the_reasoning_off(launch: Launcher, backend: FakeBackend, tmp_path: Path) -> None:
    folder = thinking_folder(tmp_path)
    service = await launch(model_path=str(folder), reasoning_parser="qwen3")
    async with httpx.AsyncClient(base_url=service.url, timeout=20) as client:
        body = {"messages": MESSAGES, "max_tokens": 20, "reasoning_effort": "none", "regex": "[0-9]+"}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert backend.requests[-1].thinking_end_id == -1
    assert set(think_ids(folder)) <= set(ints.unpack(backend.requests[-1].prompt_ids))


JOINED = "{% if not tools is defined %}{% set tools = none %}{% endif %}" + CHATML.replace(
    "message['content']",
    "message['content'] + ('{\"name\": ' + message.tool_calls[0].function.arguments if message.tool_calls else '')",
)


async def test_a_template_that_joins_arguments_to_text(launch: Launcher, backend: FakeBackend, tmp_path: Path) -> None:
    service = await launch(model_path=str(write_model_folder(tmp_path / "m", JOINED)), context_length=1600)
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [*MESSAGES, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "sunny"}]
    async with httpx.AsyncClient(base_url=service.url, timeout=20) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": history, "tools": [TOOL], "max_tokens": 2})
        assert answer.status_code == 200, answer.text
    assert '<|im_start|>assistant\n{"name": {"city": "Rome"}' in prompt_of(backend)
