"""Several HTTP processes on one system: whichever is asked, the answer is about all of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from shared.messages.control import ServiceMetrics
from shared.messages.request import TenantUsage
from tests.tokenizer.conftest import Launcher
from tests.tokenizer.fake_backend import FakeBackend, endless

WORK = {"text": "hello", "sampling_params": {"max_new_tokens": 2}}


@pytest.fixture
async def doors(launch: Launcher) -> AsyncIterator[list[httpx.AsyncClient]]:
    async with AsyncExitStack() as stack:
        services = [await launch(service_id=f"tokenizer-{number}") for number in range(2)]
        yield [
            await stack.enter_async_context(httpx.AsyncClient(base_url=service.url, timeout=20)) for service in services
        ]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("batch", [False, True])
async def test_an_abort_through_another_door_reaches_every_choice(
    doors: list[httpx.AsyncClient], backend: FakeBackend, n: int, batch: bool
) -> None:
    backend.script = endless
    text = ["one", "two"] if batch else "one"
    count = n * (2 if batch else 1)
    body = {"text": text, "rid": "mine", "sampling_params": {"max_new_tokens": 500, "n": n}}
    running = asyncio.ensure_future(doors[0].post("/generate", json=body))
    other = asyncio.ensure_future(doors[1].post("/generate", json={**body, "rid": "mine2"}))
    await backend.until(lambda: backend.live == 2 * count)
    assert (await doors[1].post("/abort_request", json={"rid": "mine"})).status_code == 200
    answers = (await running).json()
    for answer in answers if isinstance(answers, list) else [answers]:
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert backend.live == count  # an id is exact, never a prefix
    await doors[0].post("/abort_request", json={"abort_all": True})
    await other
    assert backend.live == 0


async def test_a_chat_is_aborted_by_the_id_of_its_answer(doors: list[httpx.AsyncClient], backend: FakeBackend) -> None:
    backend.script = endless
    body = {"messages": [{"role": "user", "content": "hello"}], "n": 2, "stream": True}
    async with doors[0].stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.aiter_lines()
        first = await anext(lines)
        name = first.partition('"id":"')[2].partition('"')[0]
        await doors[1].post("/abort_request", json={"rid": name})
        rest = [line async for line in lines]
    assert sum('"finish_reason":"abort"' in line for line in rest) == 2


def sums(text: str, name: str) -> dict[str, float]:
    """Values of one metric by service, status and tenant."""
    families = text_string_to_metric_families(text)
    found = [sample for family in families for sample in family.samples if sample.name == name]
    return {"".join(s.labels.get(key, "") for key in ("service_id", "status", "tenant")): s.value for s in found}


async def test_metrics_are_of_the_whole_system(doors: list[httpx.AsyncClient], backend: FakeBackend) -> None:
    for door, times in zip(doors, (2, 5), strict=True):
        for _ in range(times):
            assert (await door.post("/generate", json=WORK)).status_code == 200
    seen = {"tokenizer-0": {"http_requests": 2.0, "http_responses_200": 2.0}, "tokenizer-1": {"http_requests": 5.0}}
    seen["tokenizer-1"]["http_responses_200"] = 5.0
    services = tuple(ServiceMetrics("tokenizer", name, gauges) for name, gauges in seen.items())
    backend.publish(services=services)
    for index, door in enumerate(doors):
        other = f"tokenizer-{1 - index}"
        while not sums((text := (await door.get("/metrics")).text), "radixfleet_http_requests_total").get(other):
            await asyncio.sleep(0.02)
        assert sums(text, "radixfleet_http_requests_total")[other] == seen[other]["http_requests"]
        assert sums(text, "radixfleet_http_responses_total")[f"{other}200"] == seen[other]["http_responses_200"]
        own = sums(text, "radixfleet_http_responses_total")[f"tokenizer-{index}200"]
        assert own >= seen[f"tokenizer-{index}"]["http_responses_200"]
        assert "radixfleet_service_http_responses" not in text
    info = [(await door.get("/get_server_info")).json() for door in doors]
    assert info[0]["internal_states"] == info[1]["internal_states"]


async def test_a_heartbeat_tells_the_others_what_was_answered(launch: Launcher, backend: FakeBackend) -> None:
    service = await launch()
    async with httpx.AsyncClient(base_url=service.url) as client:
        assert (await client.get("/nothing")).status_code == 404
    service.heartbeat()
    await backend.until(lambda: any(beat.gauges.get("http_responses_404") for beat in backend.beats))


async def test_tenants_see_their_own_use_operators_see_all(launch: Launcher, backend: FakeBackend) -> None:
    service = await launch(api_key="a,b", admin_api_key="admin")
    backend.publish(tenants=(TenantUsage("key-1", 3, 1, 10, 5, 7, 2), TenantUsage("key-2", 4)))
    async with httpx.AsyncClient(base_url=service.url) as client:

        async def seen(key: str, name: str = "requests_total") -> dict[str, float]:
            text = (await client.get("/metrics", headers={"authorization": f"Bearer {key}"})).text
            return sums(text, f"radixfleet_tenant_{name}")

        while not await seen("admin"):
            await asyncio.sleep(0.02)
        assert await seen("admin") == {"key-1": 3.0, "key-2": 4.0}
        assert await seen("a") == {"key-1": 3.0}
        assert await seen("b") == {"key-2": 4.0}
        assert await seen("a", "cached_tokens_total") == {"key-1": 5.0}
        assert await seen("a", "requests_live") == {"key-1": 2.0}


async def test_a_response_made_by_another_door_is_cancelled(
    doors: list[httpx.AsyncClient], backend: FakeBackend
) -> None:
    backend.script = endless
    async with doors[0].stream("POST", "/v1/responses", json={"input": "hello", "stream": True}) as answer:
        lines = answer.aiter_lines()
        while not (line := await anext(lines)).startswith("data: "):
            pass
        name = line.partition('"id":"')[2].partition('"')[0]
        assert name.startswith("resp_")
        assert (await doors[1].post(f"/v1/responses/{name}/cancel")).status_code == 404
        assert [line async for line in lines]
    assert backend.live == 0
