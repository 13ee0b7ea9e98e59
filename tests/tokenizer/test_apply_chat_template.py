"""POST /apply_chat_template: the text that a chat request would be made of."""

from __future__ import annotations

import httpx
from tokenizers import Tokenizer

from tests.tokenizer.fake_backend import FakeBackend

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hi"}]


async def render(client: httpx.AsyncClient, **body: object) -> str:
    answer = await client.post("/apply_chat_template", json={"messages": MESSAGES, **body})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["text"])


async def test_the_text_is_what_chat_sends(
    client: httpx.AsyncClient, backend: FakeBackend, tokenizer: Tokenizer
) -> None:
    text = await render(client, messages=MESSAGES[:1])
    await client.post("/v1/chat/completions", json={"messages": MESSAGES[:1], "max_tokens": 1})
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    answer = await client.post(
        "/generate", json={"text": text, "sampling_params": {"max_new_tokens": 0}, "return_prompt_token_ids": True}
    )
    assert answer.json()["prompt_token_ids"] == ids
    assert "hello" in text


async def test_how_the_text_ends(client: httpx.AsyncClient) -> None:
    whole = await render(client, add_generation_prompt=False)
    assert (await render(client)).startswith(whole)
    assert len(await render(client)) > len(whole)
    assert (await render(client, continue_final_message=True)).endswith("hi")


async def test_refusals(client: httpx.AsyncClient) -> None:
    for body, param in (
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "pirate", "content": "x"}]}, "messages[0].role"),
        ({"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": MESSAGES, "model": "other"}, "model"),
    ):
        answer = await client.post("/apply_chat_template", json=body)
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["param"] == param
