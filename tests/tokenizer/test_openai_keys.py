"""The openai package against a door with keys: its own exceptions for each refusal."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from services.tokenizer.service import TokenizerService
from shared.messages.request import RequestRejected
from shared.messages.stream import Finish, FinishReason
from tests.tokenizer.conftest import Launcher
from tests.tokenizer.fake_backend import FakeBackend, Script

MESSAGES: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def guarded(launch: Launcher) -> TokenizerService:
    return await launch(api_key="good,other", admin_api_key="admin")  # type: ignore[no-any-return]


def sdk(service: TokenizerService, key: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=service.url + "/v1", api_key=key, max_retries=0)


async def test_keys(guarded: TokenizerService) -> None:
    for key in ("good", "other", "admin"):
        async with sdk(guarded, key) as client:
            answer = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2)
            assert answer.choices[0].finish_reason == "length"
    async with sdk(guarded, "bad") as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            await client.models.list()
        assert caught.value.code == "invalid_api_key"
    async with sdk(guarded, "good") as client:
        with pytest.raises(openai.PermissionDeniedError):
            await client.post("/../flush_cache", cast_to=object)


async def test_budgets(guarded: TokenizerService, backend: FakeBackend) -> None:
    backend.reject = RequestRejected("", "rate_limited", "key-1 may send 5 requests a minute", 12.0)
    async with sdk(guarded, "good") as client:
        with pytest.raises(openai.RateLimitError, match="5 requests a minute") as caught:
            await client.completions.create(model="tiny", prompt="hello")
        assert caught.value.response.headers["retry-after"] == "12"


async def test_a_stream_that_times_out(guarded: TokenizerService, backend: FakeBackend) -> None:
    overdue = Finish(FinishReason.ABORT, message="The request timed out while it was running.", status=408)
    backend.script = lambda request: Script([270] * 3, overdue)
    async with sdk(guarded, "good") as client:
        stream = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = []
        with pytest.raises(openai.APIError, match="timed out"):
            async for chunk in stream:
                chunks.append(chunk)
    assert chunks[-1].usage is not None  # the counts were there before the error
    assert chunks[-1].usage.completion_tokens == 3
