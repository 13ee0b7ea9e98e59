"""Reports 1, 3, 4, 16, 22: accounting, isolation, full pools, gauges. See docs/reports.md."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.whole_house import WholeHouse, eventually, open_house

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(120)]
POOL = 64 * 16  # tokens


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def house() -> AsyncIterator[WholeHouse]:
    with tempfile.TemporaryDirectory(prefix="rf") as folder:
        async with open_house(Path(folder), num_pages=64) as house:
            yield house


async def leave_early(house: WholeHouse, body: dict[str, Any], events: int) -> None:
    """Read so many events of a stream, then go."""
    async with house.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        async for line in answer.aiter_lines():
            events -= line.startswith("data: ")
            if events <= 0:
                return


async def test_1_accounting_after_a_mixture_of_everything(house: WholeHouse) -> None:
    dice = random.Random(1)
    shared = [[dice.randrange(3, 400) for _ in range(50)] for _ in range(4)]

    async def one(number: int) -> None:
        prompt = dice.choice(shared)[: dice.choice((15, 16, 17, 31, 33, 50))]
        prompt = prompt + [dice.randrange(3, 400) for _ in range(dice.choice((0, 1, 16)))]
        count = dice.choice((1, 5, 17))
        body: dict[str, Any] = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
        match number % 5:
            case 0:
                await leave_early(house, {**body, "max_tokens": 200}, dice.randrange(1, 4))
            case 1:
                answer = await house.complete(prompt, count, n=2)
                assert answer["usage"]["completion_tokens"] == 2 * count
            case 2:
                stop = house.model.text(prompt, 8)[-4:]
                answer = await house.complete(prompt, 30, stop=[stop])
                assert answer["choices"][0]["finish_reason"] == "stop"
            case _:
                answer = await house.complete(prompt, count)
                assert answer["choices"][0]["text"] == house.model.text(prompt, count)

    async with house.trial():
        for _ in range(4):
            await asyncio.gather(*(one(number) for number in range(20)))


async def test_3_what_one_tenant_asked_is_no_secret_told_by_time(house: WholeHouse) -> None:
    """Both halves: nothing is found by others, and everything by oneself."""
    async with AsyncExitStack() as stack, house.trial():
        keys = house.folder / "keys"
        keys.write_text("alice key-of-alice\nbob key-of-bob\n")
        keys.chmod(0o600)
        door = await house.add_door(stack, api_key_file=str(keys))
        secret = list(range(100, 300))

        async def cached(key: str, **fields: Any) -> int:
            body = {"prompt": secret, "max_tokens": 1, **fields}
            headers = {"authorization": f"Bearer key-of-{key}"}
            async with httpx.AsyncClient(base_url=door.url, timeout=20, headers=headers) as client:
                usage = (await client.post("/v1/completions", json=body)).json()["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        assert await cached("alice") == 0
        assert await cached("bob") == 0
        assert await cached("bob", cache_salt="alice") == 0
        assert await cached("alice") == len(secret) - 1
        assert await cached("alice", cache_salt="x") == 0


async def test_4_a_pool_full_of_finished_prefixes(house: WholeHouse) -> None:
    dice = random.Random(4)
    size = 140
    prompts = [[dice.randrange(3, 400) for _ in range(size)] for _ in range(6 * POOL // size)]
    async with house.trial():
        for prompt in prompts[:20]:
            await house.complete(prompt, 1)
        for first in range(20, len(prompts), 16):
            batch = prompts[first : first + 16]
            batch += [[*dice.choice(prompts[max(first - 20, 0) : first])[:100], 5, 6, 7] for _ in range(2)]
            for prompt, answer in zip(batch, await asyncio.gather(*(house.complete(p, 3) for p in batch)), strict=True):
                assert answer["choices"][0]["text"] == house.model.text(prompt, 3)
    assert house.core.metrics.counters["evicted_tokens"] > POOL
    large = [dice.randrange(3, 400) for _ in range(POOL * 9 // 10)]
    assert (await house.complete(large, 2))["choices"][0]["text"] == house.model.text(large, 2)
    await house.check_books()


async def test_16_requests_that_outgrow_the_pool() -> None:
    """max_tokens is cut to what the pool can hold; together they take turns, and each answer is right."""
    with tempfile.TemporaryDirectory(prefix="rf") as folder:
        async with open_house(Path(folder), num_pages=32, step_s=0.0) as house:
            prompts = [[token] * 300 for token in range(10, 16)]
            async with house.trial():
                alone = await house.complete(prompts[0], 1000)
                assert alone["choices"][0]["finish_reason"] == "length"
                assert alone["usage"]["total_tokens"] == house.door.context.limit <= 512
                for first, last in ((0, 2), (0, 6)):
                    group = prompts[first:last]
                    answers = await asyncio.gather(*(house.complete(prompt, 60) for prompt in group))
                    for prompt, answer in zip(group, answers, strict=True):
                        assert answer["choices"][0]["text"] == house.model.text(prompt, 60)
            assert house.core.metrics.counters["retractions"] > 0


async def test_22_gauges_fall_when_everything_was_cancelled(house: WholeHouse) -> None:
    async with house.trial():
        body = {"prompt": "hello world", "max_tokens": 900, "ignore_eos": True}
        await asyncio.gather(*(leave_early(house, body, 2) for _ in range(40)))
    await house.check_books()

    async def gauge(name: str) -> float:
        lines = (await house.client.get("/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

    status = house.door.context.frontend
    await eventually(lambda: status.status is not None and status.status.num_running == 0)
    for name in ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:num_used_tokens", "sglang:token_usage"):
        assert await gauge(name) == 0, name
