"""Forty hostile constraints through the real door: each is refused with a 400 or obeyed, and nobody else notices."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.hostile_inputs import HOSTILE
from radixfleet.local_server import LocalServer
from tests.system.servers import serving

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

PLAIN = {
    "text": "Once upon a time, in a village by the sea,",
    "sampling_params": {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True},
}
AT_ONCE = 8  # fewer than the server has seats, so that the neighbour always has one


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with serving("--dtype", "float32") as server:
        yield server


def test_forty_hostile_inputs_beside_a_plain_stream(server: LocalServer) -> None:
    async def run() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            alone = (await client.post("/generate", json=PLAIN)).json()["output_ids"]
            over = asyncio.Event()
            neighbours = asyncio.create_task(_neighbours(client, over))
            gate = asyncio.Semaphore(AT_ONCE)
            answers = await asyncio.gather(*(_send(client, gate, params) for _, params in HOSTILE))
            for (name, params), answer in zip(HOSTILE, answers, strict=True):
                _check(name, params, answer)
            over.set()
            seen = await neighbours
            assert all(ids == alone for ids in seen)
            assert (await client.post("/generate", json=PLAIN)).json()["output_ids"] == alone

    asyncio.run(run())
    metrics = httpx.get(f"{server.url}/metrics", timeout=60).text
    broken = re.search(r"^radixfleet_scheduler_internal_errors_total\{\S* (\S+)", metrics, re.M)
    assert broken is not None
    assert float(broken[1]) == 0


async def _neighbours(client: httpx.AsyncClient, over: asyncio.Event) -> list[list[int]]:
    """Plain answers, one after the other, the last of them begun before it is over."""
    seen: list[list[int]] = []
    while not over.is_set():
        seen.append((await client.post("/generate", json=PLAIN)).json()["output_ids"])
    return seen


async def _send(client: httpx.AsyncClient, gate: asyncio.Semaphore, params: dict[str, Any]) -> httpx.Response:
    body = {"text": "Say: ", "sampling_params": {"temperature": 0, "max_new_tokens": 8, **params}}
    async with gate:
        return await client.post("/generate", json=body)


def _check(name: str, params: dict[str, Any], answer: httpx.Response) -> None:
    if answer.status_code == 400:
        error = answer.json()["error"]
        assert any(field in error["message"] for field in params), (name, error)
        assert len(error["message"]) < 1000, name
    else:
        assert answer.status_code == 200, (name, answer.text[:300])
        assert answer.json()["meta_info"]["finish_reason"]["type"] in ("stop", "length"), name
