"""/v1/responses with the openai package: answers, numbered events, tools, stored conversations."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from services.tokenizer.response_store import ResponseStore
from services.tokenizer.service import TokenizerService
from shared import ints
from shared.messages.request import RequestRejected
from shared.messages.stream import Finish, FinishReason
from tests.tokenizer.fake_backend import FakeBackend, Script, endless, scores_of
from tests.tokenizer.test_chat_tools import CALL, PARAMETERS, THOUGHT, Launcher, prompt_of, says

TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Of a city.",
    "parameters": PARAMETERS,
    "strict": False,
}
HEADS = ["response.created", "response.in_progress"]
TEXT_EVENTS = [
    *("response.output_item.added", "response.content_part.added", "response.output_text.delta"),
    *("response.output_text.done", "response.content_part.done", "response.output_item.done"),
]


@pytest.fixture
async def service(launch: Launcher) -> TokenizerService:
    return await launch(context_length=1600, reasoning_parser="qwen3")  # type: ignore[no-any-return]


@pytest.fixture
async def sdk(service: TokenizerService) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_text(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    backend.cached_tokens = 3
    answer = await sdk.responses.create(
        model="tiny", input="hello", instructions="Be kind.", max_output_tokens=4, metadata={"a": "b"}, temperature=0.5
    )
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text
    assert answer.usage is not None
    assert answer.usage.output_tokens == 4
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert (answer.temperature, answer.metadata, answer.store) == (0.5, {"a": "b"}, True)
    assert prompt_of(backend) == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_events_come_in_order_and_numbered(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    says(backend, "Good morning", size=4)
    stream = await sdk.responses.create(model="tiny", input="hello", stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert kinds[:2] == HEADS
    assert kinds[-1] == "response.completed"
    assert list(dict.fromkeys(kinds[2:-1])) == TEXT_EVENTS
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response  # type: ignore[union-attr]
    assert deltas == final.output_text == "Good morning"
    assert final.status == "completed"
    assert final.usage is not None
    whole = await sdk.responses.retrieve(final.id)
    assert whole.output_text == "Good morning"


async def test_a_tool_call_and_its_result(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    says(backend, f"<think>\nhm\n</think>\nLet me look.\n{CALL}", size=3)
    stream = await sdk.responses.create(model="tiny", input="hello", tools=[TOOL], stream=True)
    events = [event async for event in stream]
    kinds = [event.type for event in events]
    assert "response.reasoning_text.delta" in kinds
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    final = events[-1].response  # type: ignore[union-attr]
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    call = final.output[-1]
    assert json.loads(arguments) == json.loads(call.arguments) == {"city": "Pa ris"}
    indices = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert indices == [0, 1, 2]
    constraint = backend.requests[-1].constraint
    assert constraint is not None
    assert constraint.kind == "structural_tag"

    says(backend, "It is sunny.")
    output: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    stored = await sdk.responses.create(model="tiny", input=output, previous_response_id=final.id, tools=[TOOL])
    by_store = prompt_of(backend)
    assert stored.output_text == "It is sunny."
    assert "Let me look.\n<tool_call>" in by_store
    assert "<tool_response>\nsunny\n</tool_response>" in by_store
    sent: Any = [{"role": "user", "content": "hello"}, *(item.to_dict() for item in final.output), *output]
    await sdk.responses.create(model="tiny", input=sent, tools=[TOOL], store=False)
    assert prompt_of(backend) == by_store


async def test_the_stream_helper_parses(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    import pydantic

    class Pair(pydantic.BaseModel):
        a: int

    says(backend, '{"a":1}')
    async with sdk.responses.stream(model="tiny", input="hello", text_format=Pair) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert "response.output_text.done" in kinds
    assert final.output_parsed == Pair(a=1)
    constraint = backend.requests[-1].constraint
    assert constraint is not None
    assert constraint.kind == "json_schema"


async def test_logprobs(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    def script(request: Any) -> Script:
        made = Script([270, 271])
        made.scores = lambda token: scores_of([(-0.5, [(token, -0.5), (5, -2.0)])])
        return made

    backend.script = script
    answer = await sdk.responses.create(model="tiny", input="hello", top_logprobs=2)
    part: Any = answer.output[0]
    assert [entry.logprob for entry in part.content[0].logprobs] == [-0.5, -0.5]


async def test_stored_responses_are_read_and_deleted(sdk: openai.AsyncOpenAI, client: httpx.AsyncClient) -> None:
    first = await sdk.responses.create(model="tiny", input="hello", max_output_tokens=3)
    items = await sdk.responses.input_items.list(first.id)
    assert items.data[0].to_dict()["content"] == [{"type": "input_text", "text": "hello"}]
    assert (await sdk.responses.retrieve(first.id)).id == first.id
    await sdk.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as lost:
        await sdk.responses.create(model="tiny", input="hello", previous_response_id=first.id)
    assert lost.value.code == "previous_response_not_found"
    unkept = await sdk.responses.create(model="tiny", input="hello", max_output_tokens=3, store=False)
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.retrieve(unkept.id)
    assert (await client.delete(f"/v1/responses/{unkept.id}")).status_code == 404


async def test_input_items_come_in_pages(sdk: openai.AsyncOpenAI, client: httpx.AsyncClient) -> None:
    turns: Any = [{"role": "user", "content": f"turn {index}"} for index in range(5)]
    made = await sdk.responses.create(model="tiny", input=turns, max_output_tokens=1)
    expected = [[{"type": "input_text", "text": turn["content"]}] for turn in turns]
    for order in ("asc", "desc"):
        wishes: Any = {"limit": 2, "order": order}
        found = [item.to_dict()["content"] async for item in sdk.responses.input_items.list(made.id, **wishes)]
        assert found == (expected if order == "asc" else expected[::-1])
    path = f"/v1/responses/{made.id}"
    assert not (await client.get(f"{path}/input_items")).json()["has_more"]
    for query, param in (
        ("input_items?limit=0", "limit"),
        ("input_items?limit=x", "limit"),
        ("input_items?order=up", "order"),
        ("input_items?after=nobody", "after"),
        ("?stream=true", "stream"),
    ):
        answer = await client.get(f"{path}/{query}" if query[0] != "?" else path + query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), query
    assert (await client.get(f"{path}?stream=false")).status_code == 200


async def test_cancel(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    backend.script = endless
    stream = await sdk.responses.create(model="tiny", input="hello", stream=True)
    async for event in stream:
        if event.type == "response.created":
            cancelled = await sdk.responses.cancel(event.response.id)
            assert cancelled.status == "cancelled"
        last = event
    assert last.type == "response.incomplete"
    assert last.response.status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.cancel("resp_none")


async def test_a_failure_in_mid_stream(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    backend.script = lambda request: Script([270, 271], Finish(FinishReason.ERROR, message="it broke", status=500))
    stream = await sdk.responses.create(model="tiny", input="hello", stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert events[-1].response.error is not None
    assert events[-1].response.error.message == "it broke"


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": []}, "input"),
    ({"input": "hello " * 3000}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"truncation": "auto"}, "truncation"),
    ({"background": True}, "background"),
    ({"conversation": "c"}, "conversation"),
    ({"max_output_tokens": -1}, "max_output_tokens"),
    ({"include": ["x"]}, "include"),
    ({"n": 2}, "n"),
]


async def test_bad_fields_are_refused_by_name(client: httpx.AsyncClient) -> None:
    for fields, param in BAD:
        answer = await client.post("/v1/responses", json={"input": "hello", **fields})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == param


async def test_a_refused_schema_is_told_by_its_tool(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    place = "#/format/tags/0/content/elements/1/json_schema/properties/a/type"
    backend.reject = RequestRejected("", "bad_constraint", f"structural_tag: {place}: 'stuff' is no type")
    with pytest.raises(openai.BadRequestError, match="stuff") as refused:
        await sdk.responses.create(model="tiny", input="hello", tools=[TOOL], stream=True)
    assert refused.value.param == "tools[0].parameters"


async def test_reasoning_effort_reaches_the_template(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    says(backend, THOUGHT)
    answer = (await client.post("/v1/responses", json={"input": "hello", "reasoning": {"effort": "low"}})).json()
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    assert ints.count(backend.requests[-1].prompt_ids) > 0


# The store


def bounded(**limits: Any) -> ResponseStore:
    return ResponseStore("", **{"max_count": 10, "max_bytes": 1000, "ttl": 100.0, **limits})


async def test_the_store_keeps_to_its_owner_and_its_bounds() -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1
        return now[0]

    store = bounded(max_count=3, clock=clock)
    for name in "abc":
        await store.put(name, "alice", name.encode())
    assert await store.get("a", "bob") is None
    assert await store.delete("a", "bob") is False
    assert await store.get("a", "alice") == b"a"  # now the last one used
    await store.put("d", "alice", b"d")
    assert [await store.get(name, "alice") for name in "abcd"] == [b"a", None, b"c", b"d"]
    await store.put("e", "alice", b"x" * 998)
    assert [await store.get(name, "alice") is not None for name in "acde"] == [False, True, True, True]
    await store.put("f", "alice", b"x" * 1001)
    assert await store.get("f", "alice") is None
    now[0] += 1000
    assert await store.get("e", "alice") is None
    store.close()


async def test_two_processes_share_a_store(run_dir: Any) -> None:
    limits: dict[str, Any] = {"max_count": 10, "max_bytes": 1000, "ttl": 100.0}
    one, two = (ResponseStore(str(run_dir / "responses.sqlite"), **limits) for _ in range(2))
    await one.put("a", "", b"body")
    assert await two.get("a", "") == b"body"
    assert await two.delete("a", "") is True
    assert await one.get("a", "") is None
    one.close()
    two.close()


async def test_a_stored_response_is_its_owners(launch: Launcher, backend: FakeBackend) -> None:
    service = await launch(api_key="key-of-alice-1234,key-of-bob-56789", context_length=1600)
    async with httpx.AsyncClient(base_url=service.url, timeout=20) as client:

        async def ask(key: str, method: str, path: str, **body: Any) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return await client.request(method, f"/v1/responses{path}", headers=headers, json=body or None)

        made = (await ask("key-of-alice-1234", "POST", "", input="hello", max_output_tokens=3)).json()
        path = f"/{made['id']}"
        for method, place in (
            ("GET", path),
            ("DELETE", path),
            ("POST", f"{path}/cancel"),
            ("GET", f"{path}/input_items"),
        ):
            assert (await ask("key-of-bob-56789", method, place)).status_code == 404, (method, place)
        wish = {"input": "hello", "previous_response_id": made["id"], "max_output_tokens": 3}
        assert (await ask("key-of-bob-56789", "POST", "", **wish)).status_code == 400
        assert (await ask("key-of-alice-1234", "POST", "", **wish)).status_code == 200
