"""The openai package as a user has it, synchronous in a thread and asynchronous."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from services.tokenizer.service import TokenizerService
from shared.messages.request import RequestRejected
from shared.messages.stream import Finish, FinishReason
from tests.tokenizer.fake_backend import WORDS, FakeBackend, Script, endless
from tests.tokenizer.tiny_folder import CONTEXT

MESSAGES: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def sdk(service: TokenizerService) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=service.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_synchronous(service: TokenizerService) -> None:
    def use() -> tuple[Any, list[str], list[Any]]:
        with openai.OpenAI(base_url=service.url + "/v1", api_key="none") as client:
            answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4)
            stream = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=4, stream=True)
            deltas = [chunk.choices[0].delta.content or "" for chunk in stream]
            return answer, deltas, list(client.models.list())

    answer, deltas, models = await asyncio.to_thread(use)
    assert answer.choices[0].message.content == "".join(deltas)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert [model.id for model in models] == ["tiny"]


async def test_asynchronous_stream(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    backend.cached_tokens = 7
    stream = await sdk.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=6, n=2, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == 12
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 7
    for index in range(2):
        choices = [c for chunk in chunks for c in chunk.choices if c.index == index]
        assert choices[0].delta.role == "assistant"
        assert WORDS.startswith("".join(c.delta.content or "" for c in choices))
        assert [c.finish_reason for c in choices if c.finish_reason] == ["length"]


async def test_stream_helper(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    ids = backend.tokenizer.encode(WORDS).ids[:4]
    backend.script = lambda request: Script([*ids, 2], Finish(FinishReason.STOP, matched_token=2))
    async with sdk.chat.completions.stream(model="tiny", messages=MESSAGES, max_tokens=4) as stream:
        final = await stream.get_final_completion()
    assert WORDS.startswith(final.choices[0].message.content or "?")


async def test_completions(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(model="tiny", prompt=["hello", "good"], max_tokens=3, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    stream = await sdk.completions.create(model="tiny", prompt="hello", max_tokens=3, stream=True)
    assert WORDS.startswith("".join([chunk.choices[0].text async for chunk in stream]))


async def test_logprobs(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    from tests.tokenizer.fake_backend import scores_of

    def script(request: Any) -> Script:
        made = Script([270, 271])
        made.scores = lambda token: scores_of([(-0.5, [(token, -0.5), (5, -2.0)])])
        return made

    backend.script = script
    answer = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == [-0.5, -0.5]
    assert len(logprobs.content[0].top_logprobs) == 2


async def test_errors_are_readable(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist") as missing:
        await sdk.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="temperature must be") as bad:
        await sdk.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-2)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match=str(CONTEXT)) as long:
        await sdk.completions.create(model="tiny", prompt=[5] * 1000, stream=True)
    assert long.value.code == "context_length_exceeded"
    backend.reject = RequestRejected("", "queue_full", "too many requests are waiting", 1.0)
    with pytest.raises(openai.RateLimitError, match="too many requests are waiting"):
        await sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)


async def test_a_failure_in_mid_stream(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    failing = Script([270, 271], Finish(FinishReason.ERROR, message="the worker broke", status=500))
    failing.pause_after = 1
    backend.script = lambda request: failing
    stream = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    text = ""
    with pytest.raises(openai.APIError, match="the worker broke"):
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            failing.resume.set()
    assert text == backend.tokenizer.decode([270, 271])


async def test_closing_a_stream_aborts(sdk: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    backend.script = endless
    stream = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await backend.until(lambda: backend.aborted and backend.live == 0)
