"""Chat over the wire against the fake backend."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx

from services.tokenizer.service import TokenizerService
from tests.tokenizer.fake_backend import WORDS, FakeBackend

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}


def events(text: str) -> list[Any]:
    found = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert found[-1] == "[DONE]"
    return [json.loads(line) for line in found[:-1]]


async def test_chat(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.cached_tokens = 5
    answer = await client.post("/v1/chat/completions", json=CHAT)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    [choice] = body["choices"]
    assert choice["finish_reason"] == "length"
    assert WORDS.startswith(choice["message"]["content"])
    usage = body["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["prompt_tokens_details"] == {"cached_tokens": 5}
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    await backend.until(lambda: backend.acked)
    assert backend.aborted == []


async def test_chat_stream(client: httpx.AsyncClient, backend: FakeBackend, service: TokenizerService) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = (await answer.aread()).decode()
    chunks = events(text)
    first, *rest, finish, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    content = "".join(chunk["choices"][0]["delta"]["content"] for chunk in rest)
    assert WORDS.startswith(content)
    assert content
    assert finish["choices"][0]["delta"] == {}
    assert finish["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 8
    assert {chunk["id"] for chunk in chunks} == {first["id"]}
    assert {chunk["created"] for chunk in chunks} == {first["created"]}
    await backend.until(lambda: backend.acked)
    assert backend.aborted == []
    assert len(service.context.frontend.streams) == 0


async def test_generate_stream_is_cumulative(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 8}, "stream": True}
    answer = await client.post("/generate", json=body)
    chunks = events(answer.text)
    texts = [chunk["text"] for chunk in chunks]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    assert len(chunks[-1]["output_ids"]) == 8
    assert all(chunk["meta_info"]["finish_reason"] is None for chunk in chunks[:-1])
    assert "index" not in chunks[0]
