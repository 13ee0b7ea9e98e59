"""/v1/chat/completions over the wire: order of streams, counts, contents, log-probabilities."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from services.tokenizer.service import TokenizerService
from shared import ints
from shared.messages.stream import Finish, FinishReason
from tests.tokenizer.conftest import Launcher
from tests.tokenizer.fake_backend import WORDS, FakeBackend, Script, endless, scores_of
from tests.tokenizer.sse_reader import events
from tests.tokenizer.tiny_folder import CONTEXT

PATH = "/v1/chat/completions"
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


async def test_whole_answer(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.cached_tokens = 5
    answer = await client.post(PATH, json=CHAT)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "tiny"
    [choice] = body["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["role"] == "assistant"
    assert WORDS.startswith(choice["message"]["content"])
    usage = body["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["reasoning_tokens"] == 0
    assert usage["prompt_tokens_details"] == {"cached_tokens": 5}
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    await backend.until(lambda: backend.acked)
    assert backend.aborted == []


async def test_order_of_a_stream(client: httpx.AsyncClient, backend: FakeBackend, service: TokenizerService) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", PATH, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        chunks = events((await answer.aread()).decode())
    first, *rest, finish, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["choices"][0]["finish_reason"] is None
    content = "".join(chunk["choices"][0]["delta"]["content"] for chunk in rest)
    assert WORDS.startswith(content)
    assert content
    assert finish["choices"][0]["delta"] == {}
    assert finish["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 8
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert {chunk["id"] for chunk in chunks} == {first["id"]}
    assert {chunk["created"] for chunk in chunks} == {first["created"]}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    await backend.until(lambda: backend.acked)
    assert backend.aborted == []
    assert len(service.context.frontend.streams) == 0


async def test_stream_of_choices_that_end_apart(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    def script(request: Any) -> Script:
        if request.choice_index == 1:
            return Script([270], Finish(FinishReason.STOP, matched_string="x"))
        return Script([270] * (request.choice_index + 3))

    backend.script = script
    body = {**CHAT, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = events((await client.post(PATH, json=body)).text)
    by_index: dict[int, list[Any]] = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        by_index.setdefault(choice["index"], []).append(choice)
    assert sorted(by_index) == [0, 1, 2]
    for index, choices in by_index.items():
        assert [c for c in choices if "role" in c["delta"]] == choices[:1]
        assert [c for c in choices if c["finish_reason"]] == choices[-1:]
        assert choices[-1]["finish_reason"] == ("stop" if index == 1 else "length")
    assert usage["usage"]["completion_tokens"] == 3 + 1 + 5
    whole = (await client.post(PATH, json={**CHAT, "n": 3})).json()
    assert whole["usage"] == usage["usage"]
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]


async def test_no_usage_unless_asked(client: httpx.AsyncClient) -> None:
    for options in (None, {"include_usage": False}):
        chunks = events((await client.post(PATH, json={**CHAT, "stream": True, "stream_options": options})).text)
        assert all("usage" not in chunk for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events((await client.post(PATH, json={**CHAT, "stream": True, "stream_options": options})).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 8


async def test_tokens_that_wait_go_out_in_one_write(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    script = Script([270] * 8)
    backend.script = lambda request: script
    async with client.stream("POST", PATH, json={**CHAT, "stream": True}) as answer:
        pieces = [piece async for piece in answer.aiter_raw()]
    assert len(events(b"".join(pieces).decode())) < 12


async def test_separators_are_escaped(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    text = "a\u2028b\u2029c\u0085d\ne"
    backend.script = lambda request: Script([270], texts=[text])
    raw = (await client.post(PATH, json={**CHAT, "stream": True})).content.decode()
    assert not set("\u2028\u2029\u0085") & set(raw)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in events(raw)) == text
    whole = (await client.post(PATH, json=CHAT)).json()
    assert whole["choices"][0]["message"]["content"] == text


async def test_keep_alive_comments_while_nothing_comes(launch: Launcher, backend: FakeBackend) -> None:
    service = await launch(keep_alive_interval=0.05)
    script = Script([270])
    script.gate = asyncio.Event()
    backend.script = lambda request: script
    async with (
        httpx.AsyncClient(base_url=service.url, timeout=20) as client,
        client.stream("POST", PATH, json={**CHAT, "stream": True}) as answer,
    ):
        assert answer.status_code == 200  # headers are here, tokens are not
        text = ""
        async for piece in answer.aiter_text():
            text += piece
            if text.count(": keep-alive\n\n") == 3:
                script.gate.set()
    assert text.startswith(": keep-alive\n\n")
    assert events(text)[-1]["choices"][0]["finish_reason"] == "length"


async def test_what_is_left_of_the_context(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    for fields, expected in (
        ({"max_tokens": None}, None),
        ({"max_tokens": 5}, 5),
        ({"max_tokens": None, "max_completion_tokens": 6}, 6),
        ({"max_tokens": 7, "max_completion_tokens": 7}, 7),
        ({"max_tokens": 10**9}, None),
    ):
        answer = await client.post(PATH, json={**CHAT, **fields})
        length = answer.json()["usage"]["prompt_tokens"]
        wanted = expected if expected is not None else CONTEXT - length
        assert backend.requests[-1].sampling.max_tokens == wanted


async def test_equal_forms_of_content(client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer) -> None:
    for role in ("system", "user", "assistant", "tool"):
        forms: list[Any] = [
            "one two",
            [{"type": "text", "text": "one two"}],
            [{"type": "text", "text": "one"}, {"type": "text", "text": " t"}, {"type": "text", "text": "wo"}],
        ]
        counts = set()
        for content in forms:
            messages = [{"role": role, "content": content}, {"role": "user", "content": "x"}]
            answer = await client.post(PATH, json={**CHAT, "messages": messages})
            counts.add(answer.json()["usage"]["prompt_tokens"])
            assert "one two" in tokenizer.decode(list(ints.unpack(backend.requests[-1].prompt_ids)))
        assert len(counts) == 1
    counts = set()
    for message in ({"content": ""}, {"content": []}, {"content": None}, {}):
        messages = [{"role": "assistant", **message}, {"role": "user", "content": "x"}]
        answer = await client.post(PATH, json={**CHAT, "messages": messages})
        counts.add(answer.json()["usage"]["prompt_tokens"])
    assert len(counts) == 1


async def test_template_words_reach_the_client(tmp_path: Any, launch: Launcher) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ raise_exception('Roles must alternate, please') }}")
    service = await launch(chat_template=str(template))
    async with httpx.AsyncClient(base_url=service.url) as client:
        answer = await client.post(PATH, json=CHAT)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "Roles must alternate, please"
        assert (await client.post("/generate", json={"text": "x"})).status_code == 200


async def test_continue_final_message(client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "Well"}]
    await client.post(PATH, json={**CHAT, "messages": messages, "continue_final_message": True})
    text = tokenizer.decode(list(ints.unpack(backend.requests[-1].prompt_ids)), skip_special_tokens=False)
    assert text.endswith("<|im_start|>assistant\nWell")


async def test_logprobs(client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("é").ids  # one byte per token
    assert len(ids) == 2

    def script(request: Any) -> Script:
        assert request.sampling.logprobs == 1
        made = Script(ids, texts=["", "é"])
        made.scores = lambda token: scores_of([(-0.5, [(token, -0.5)])])
        return made

    backend.script = script
    body = {**CHAT, "logprobs": True, "top_logprobs": 1}
    [choice] = (await client.post(PATH, json=body)).json()["choices"]
    content = choice["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "é"
    assert [entry["token"] for entry in content] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert [entry["top_logprobs"][0]["logprob"] for entry in content] == [-0.5, -0.5]
    chunks = events((await client.post(PATH, json={**body, "stream": True})).text)
    streamed = [c["choices"][0]["logprobs"]["content"] for c in chunks if c["choices"][0]["logprobs"]]
    assert [entry for block in streamed for entry in block] == content


async def test_abort_by_id(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = endless
    for name in ("a1", "chatcmpl-a1"):
        backend.aborted.clear()
        running = asyncio.ensure_future(client.post(PATH, json={**CHAT, "rid": "a1", "n": 2}))
        neighbour = asyncio.ensure_future(client.post(PATH, json={**CHAT, "rid": "a10"}))
        await backend.until(lambda: backend.live == 3)
        duplicate = await client.post(PATH, json={**CHAT, "rid": "a1"})
        assert duplicate.status_code == 400
        assert duplicate.json()["error"]["code"] == "duplicate_id"
        assert (await client.post("/abort_request", json={"rid": name})).status_code == 200
        body = (await running).json()
        assert [choice["finish_reason"] for choice in body["choices"]] == ["abort", "abort"]
        assert backend.live == 1
        assert not neighbour.done()
        assert (await client.post("/abort_request", json={"rid": "unknown"})).status_code == 200
        assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 200
        assert (await neighbour).json()["choices"][0]["finish_reason"] == "abort"
        await backend.until(lambda: len(backend.acked) >= 3)
        backend.acked.clear()


@pytest.mark.parametrize("stream", [False, True])
async def test_aborted_native_answers_say_so(client: httpx.AsyncClient, backend: FakeBackend, stream: bool) -> None:
    backend.script = endless
    body = {"text": "x", "rid": "r", "stream": stream}
    running = asyncio.ensure_future(client.post("/generate", json=body))
    await backend.until(lambda: backend.live == 1)
    await client.post("/abort_request", json={"rid": "r"})
    answer = await running
    last = events(answer.text)[-1] if stream else answer.json()
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["meta_info"]["completion_tokens"] == len(last["output_ids"])
