"""Slow links and partitions between the scheduler and a worker: a pause at most, and never another token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlparse

import pytest

from services.scheduler.__main__ import SchedulerService
from tests.deploy.fault_proxy import FaultProxy
from tests.fake_model import generate
from tests.fakes import FakeDetokenizer, FakeWorker
from tests.local_fleet import tokens
from tests.local_peers import worker_hello
from tests.protocol.house import House

REQUESTS = 6
SHORT, LONG = 24, 240  # tokens of an answer; a long one is not over before something can happen to it


class Site:
    """A scheduler, a worker behind the proxy ("far") and, if wanted, one beside it ("near")."""

    def __init__(self, house: House) -> None:
        self.house = house
        self.proxy: FaultProxy
        self.service: SchedulerService
        self.detokenizer: FakeDetokenizer
        self.workers: list[FakeWorker] = []

    async def open(self, heartbeat_timeout: float) -> None:
        self.house.endpoints["w"] = "tcp://127.0.0.1:*"
        self.service = await self.house.scheduler(heartbeat_timeout=heartbeat_timeout)
        self.endpoint = self.service._servers[2].endpoint
        port = urlparse(self.endpoint).port
        assert port is not None
        self.proxy = await FaultProxy("127.0.0.1", port).__aenter__()
        self.detokenizer = await self.house.detokenizer()
        self.frontend = await self.house.frontend()

    async def join(self, name: str, incarnation: int = 1, *, far: bool = False) -> FakeWorker:
        endpoint = self.proxy.endpoint if far else self.endpoint
        worker = FakeWorker(endpoint, worker_hello(name, incarnation), 0.002)
        self.workers.append(worker)
        async with asyncio.timeout(20):
            await worker.greeted.wait()
        return worker

    def submit(self, length: int) -> None:
        self.length = length
        for index in range(REQUESTS):
            self.frontend.submit(f"r{index}", tokens(30 + index, seed=index), length)

    async def answered(self) -> None:
        """Every stream is the undisturbed one; gaps and repetitions have failed before."""
        rids = [f"r{index}" for index in range(REQUESTS)]
        await self.detokenizer.until(lambda: self.detokenizer.finished(*rids), timeout=30)
        for index, rid in enumerate(rids):
            assert self.detokenizer.streams[rid].tokens == generate(tokens(30 + index, seed=index), self.length)

    async def under_way(self) -> None:
        streams = self.detokenizer.streams
        await self.detokenizer.until(
            lambda: len(streams) == REQUESTS and all(stream.tokens for stream in streams.values())
        )

    async def close(self) -> None:
        for worker in self.workers:
            await worker.close()
        await self.proxy.__aexit__()


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    house = House(tmp_path)
    site = Site(house)
    await site.open(heartbeat_timeout=2.5)
    yield site
    await site.close()
    await house.close()


async def test_a_link_with_a_long_delay_only_costs_time(site: Site) -> None:
    site.proxy.delay_s = 0.03
    await site.join("far", far=True)
    site.submit(SHORT)
    await site.answered()
    assert site.service.scheduler is not None
    assert site.service.scheduler.core.metrics.counters["workers_lost"] == 0


async def test_a_narrow_link_only_costs_time(site: Site) -> None:
    site.proxy.bytes_per_s = 50_000
    await site.join("far", far=True)
    site.submit(SHORT)
    await site.answered()


async def test_a_cut_moves_the_streams_to_the_other_worker(site: Site) -> None:
    far = await site.join("far", far=True)
    site.submit(LONG)
    await site.under_way()
    await site.join("near")
    far.silent = True  # it does not outlive its connection
    site.proxy.accepts = False
    site.proxy.cut()
    await site.answered()


async def test_a_partition_is_noticed_by_its_silence(site: Site) -> None:
    """Nothing breaks: packets just do not arrive. After it heals, the old life is not believed any more."""
    far = await site.join("far", far=True)
    site.submit(LONG)
    await site.under_way()
    near = await site.join("near")
    site.proxy.freeze()
    await site.answered()
    assert near.num_results
    assert site.service.scheduler is not None
    assert [worker.worker_id for worker in site.service.scheduler.core.fleet] == ["near"]
    site.proxy.thaw()
    await far.close()
    again = await site.join("far", 2, far=True)
    assert again.reset is None
    assert {worker.worker_id for worker in site.service.scheduler.core.fleet} == {"near", "far"}


async def test_requests_wait_for_a_worker_that_comes_back(site: Site) -> None:
    far = await site.join("far", far=True)
    site.submit(LONG)
    await site.under_way()
    far.silent = True
    site.proxy.cut()
    await far.close()
    await site.join("far", 2, far=True)
    await site.answered()
    assert site.proxy.connections >= 2
