"""Whoever reads the events has the tree: what each worker holds, at every moment, page by page."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from services.scheduler.kv_events import EventBatch, KvEvents
from services.scheduler.kv_publisher import END, KvPublisher
from services.scheduler.node import TOKEN_BYTES
from services.scheduler.radix_tree import RadixTree
from shared import ints
from tests.deploy.event_reader import Reader
from tests.local_fleet import LocalFleet, tokens
from tests.protocol.house import House

PATIENCE_S = 20
ALL_STEPS = 1 << 60


def held_pages(tree: RadixTree, worker: str, ready: int) -> set[tuple[str, tuple[int, ...]]]:
    """Every full page of the worker whose step is done: (namespace, tokens up to its end)."""
    found: set[tuple[str, tuple[int, ...]]] = set()
    page_bytes = tree.page_size * TOKEN_BYTES
    for node in tree._store.nodes_of(worker):
        if node.parent is None or len(node.tokens) < page_bytes:
            continue
        path, above = node.tokens, node.parent
        while above.parent is not None:
            path, above = above.tokens + path, above.parent
        start = len(path) - len(node.tokens)
        if node.copies[worker].ready_step <= ready:
            for end in range(start + page_bytes, len(path) + 1, page_bytes):
                found.add((above.key.hex(), tuple(ints.unpack(path[:end]).tolist())))
    return found


class Followed:
    """A scheduler without sockets whose events are read as they come."""

    def __init__(self, **config: Any) -> None:
        self.reader = Reader()
        self.batches: list[EventBatch] = []
        self.fleet = LocalFleet(workers=0, **config)
        core = self.fleet.core
        core.tree.observer = core.kv_events = KvEvents(core.tree.page_size, self.take, lambda: 1.5)

    def take(self, batch: EventBatch) -> None:
        self.batches.append(batch)
        self.reader.take(msgspec.msgpack.encode(batch))

    def check(self) -> None:
        core = self.fleet.core
        for rank, worker in enumerate(core.fleet):
            known = self.reader.workers[rank].paths
            settled = worker.inflight[0].step_id - 1 if worker.inflight else ALL_STEPS
            # A node that is still growing is as a whole as young as its last page.
            assert held_pages(core.tree, worker.key, settled) <= known <= held_pages(core.tree, worker.key, ALL_STEPS)


def test_random_lives_leave_the_reader_with_the_tree() -> None:
    """Prompts that share prefixes, splits, evictions, growth by decoding, aborts, two namespaces, two workers."""
    followed = Followed(hello={"num_pages": 40})
    fleet = followed.fleet
    fleet.add_worker("w0")
    fleet.add_worker("w1")
    rng = random.Random(4)
    stems = [tokens(rng.randrange(16, 120), seed=seed) for seed in range(5)]
    for number in range(60):
        stem = rng.choice(stems)
        prompt = stem[: rng.randrange(1, len(stem) + 1)] + tokens(rng.randrange(1, 40), seed=number + 100)
        rid = fleet.submit(prompt, rng.randrange(1, 40), namespace=rng.choice([b"", b"tenant"]))
        fleet.turn()
        followed.check()
        for _ in range(rng.randrange(12)):
            if busy := [worker for worker in fleet.workers.values() if worker.commands]:
                fleet.step(rng.choice(busy))
            fleet.turn()
            followed.check()
        if rng.random() < 0.1:
            fleet.abort(rid)
    fleet.run()
    followed.check()
    kinds = {type(event).__name__ for batch in followed.batches for event in batch.events}
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def test_pages_are_announced_once_their_step_is_done_and_cleared_with_their_worker() -> None:
    followed = Followed()
    worker = followed.fleet.add_worker("w0")
    followed.fleet.submit(tokens(65), 4)
    followed.fleet.turn()
    assert followed.reader.workers[0].paths == set()
    followed.fleet.step(worker)
    followed.fleet.turn()
    assert len(followed.reader.workers[0].paths) == 4
    followed.fleet.core.fleet.drop(next(iter(followed.fleet.core.fleet)), "test")
    followed.fleet.turn()
    assert followed.reader.workers[0].paths == set()


def test_the_fields_are_those_that_routers_know() -> None:
    followed = Followed()
    worker = followed.fleet.add_worker("w0")
    prompt = tokens(33)
    followed.fleet.submit(prompt, 1)
    followed.fleet.turn()
    followed.fleet.step(worker)
    followed.fleet.turn()
    _, batch = followed.batches
    stamp, (event,), rank = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    assert (stamp, rank) == (1.5, 0)
    kind, hashes, parent, ids, size, lora, medium, *rest = event
    assert set(rest) <= {None}
    assert (kind, parent, ids, size, lora, medium) == ("BlockStored", None, prompt[:32], 16, None, "GPU")
    assert len(set(hashes)) == 2
    assert all(0 <= block < 1 << 64 for block in hashes)


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    house = House(tmp_path)
    yield house
    await house.close()


class Subscriber:
    """An outside program: SUB for the stream, DEALER for what it missed."""

    def __init__(self, publisher: KvPublisher) -> None:
        self.reader = Reader()
        self.expected = 0
        context = zmq.Context.instance()
        self.sub, self.dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        for socket in (self.sub, self.dealer):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVTIMEO, PATIENCE_S * 1000)
        self.sub.subscribe("kv-events")
        self.sub.connect(publisher.endpoint)
        self.dealer.connect(publisher.replay_endpoint)

    def receive(self) -> None:
        """One batch of the stream, and before it whatever is missing."""
        topic, number, payload = self.sub.recv_multipart()
        assert topic == b"kv-events"
        if int.from_bytes(number, "big") > self.expected:
            self.replay()
        if int.from_bytes(number, "big") == self.expected:
            self._take(payload)

    def replay(self) -> None:
        self.dealer.send_multipart([b"", self.expected.to_bytes(8, "big")])
        while True:
            empty, number, payload = self.dealer.recv_multipart()
            assert empty == b""
            if number == END:
                return
            assert int.from_bytes(number, "big") == self.expected
            self._take(payload)

    def _take(self, payload: bytes) -> None:
        self.reader.take(payload)
        self.expected += 1

    def close(self) -> None:
        self.sub.close()
        self.dealer.close()


async def test_a_subscriber_that_came_late_and_missed_some_has_the_whole_tree(house: House, tmp_path: Path) -> None:
    service = await house.scheduler(
        kv_events_endpoint=f"ipc://{tmp_path}/events", kv_events_replay_endpoint=f"ipc://{tmp_path}/replay"
    )
    assert service.kv_publisher is not None
    await house.worker("w0")
    detokenizer, frontend = await house.detokenizer(), await house.frontend()

    async def serve(*numbers: int) -> None:
        for number in numbers:
            frontend.submit(f"r{number}", tokens(70, seed=number % 3) + tokens(20, seed=number), 20)
        await detokenizer.until(lambda: detokenizer.finished(*(f"r{number}" for number in numbers)))

    await serve(0, 1, 2)  # nobody listens yet
    subscriber = await asyncio.to_thread(Subscriber, service.kv_publisher)
    try:
        await asyncio.to_thread(subscriber.replay)
        await serve(3, 4, 5)
        await asyncio.to_thread(subscriber.receive)
        missed = await asyncio.to_thread(subscriber.sub.recv_multipart)  # lost on its way
        assert int.from_bytes(missed[1], "big") >= subscriber.expected
        await serve(6, 7)
        assert service.scheduler is not None
        core = service.scheduler.core
        while subscriber.expected < service.kv_publisher._next:
            await asyncio.to_thread(subscriber.receive)
        (worker,) = core.fleet
        assert subscriber.reader.workers[0].paths == held_pages(core.tree, worker.key, ALL_STEPS)
        assert len(subscriber.reader.workers[0].paths) > 12
    finally:
        subscriber.close()


def test_nothing_is_published_and_nothing_observed_by_default() -> None:
    fleet = LocalFleet()
    assert fleet.core.kv_events is None
    assert fleet.core.tree.observer is None
