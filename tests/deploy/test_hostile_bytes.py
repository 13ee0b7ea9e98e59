"""Random, truncated, oversized and foreign messages on every edge: dropped, counted, and nothing else happens."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from services.detokenizer.detokenizer import Detokenizer
from shared import ints
from shared.config import DetokenizerConfig
from shared.messages.control import Heartbeat, Hello, Ping, Pong
from shared.messages.edges import (
    DetokenizerToTokenizer,
    FromDetokenizer,
    FromTokenizer,
    FromWorker,
    TokenizerToDetokenizer,
    ToTokenizer,
    ToWorker,
)
from shared.messages.request import AbortRequest
from shared.messages.step import StepCommand, StepResult, WorkerWelcome
from shared.messages.stream import Finish, FinishReason, StopMatched, StreamOpen, TextChunks, TokenChunk, TokenChunks
from shared.transport import MAX_MESSAGE_BYTES, Client, Server
from tests.deploy.hostile import (
    Message,
    foreign_messages,
    mutated_requests,
    oversized_messages,
    random_messages,
    raw_dealer,
    truncated_messages,
)
from tests.fake_model import generate
from tests.local_fleet import tokens
from tests.protocol.house import House

PATIENCE_S = 20
EDGES = {  # who sends, what may be sent, one example
    "t": (FromTokenizer, AbortRequest(("r0",))),
    "d": (FromDetokenizer, StopMatched("r0", 3, "x", 1)),
    "w": (FromWorker, StepResult(0, 1, b"1234", b"")),
}


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    house = House(tmp_path)
    yield house
    await house.close()


def undecodable(union: Any, messages: list[Message]) -> list[Message]:
    """Those that are really no message of the union: a prefix may be a shorter message."""
    decoder = msgspec.msgpack.Decoder(union)

    def fails(message: Message) -> bool:
        try:
            decoder.decode(message[0])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return True
        return False

    return [message for message in messages if fails(message)]


async def settled(endpoint: str, union: Any) -> None:
    """Until everything sent before is handled: an honest peer is answered after the hostile ones' messages."""
    answered = asyncio.Event()
    client: Client[Any] = Client(endpoint, "honest/1", union, lambda *_: answered.set())
    client.on_writable = lambda: client.try_send(Ping(9))
    client.on_writable()
    try:
        await asyncio.wait_for(answered.wait(), PATIENCE_S)
    finally:
        client.close()


async def all_counted(server: Any, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while server.malformed < count:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("edge", EDGES)
async def test_the_scheduler_goes_on_as_if_nothing_had_come(house: House, edge: str) -> None:
    service = await house.scheduler()
    worker = await house.worker()
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    worker.gate.clear()
    for index in range(4):
        frontend.submit(f"r{index}", tokens(40, seed=index), 20)
    await detokenizer.until(lambda: len(detokenizer.streams) == 4)
    union, example = EDGES[edge]
    rng = random.Random(edge)
    messages = random_messages(rng, 200)
    messages += undecodable(union, truncated_messages(example))
    messages += undecodable(union, foreign_messages(union, rng))
    messages += oversized_messages()
    assert service.scheduler is not None
    server = service._servers["tdw".index(edge)]
    before = dict(service.scheduler.core.metrics.counters)
    with raw_dealer(house.endpoints[edge], b"evil/1") as raw:
        for message in messages:
            raw.send_multipart(message)
        await all_counted(server, len(messages))
    assert server.malformed == len(messages)
    counters = service.scheduler.core.metrics.counters
    assert {name: counters[name] - before[name] for name in before if name.endswith(("_lost", "errors"))} == {
        "workers_lost": 0,
        "detokenizers_lost": 0,
        "tokenizers_lost": 0,
        "internal_errors": 0,
    }
    service.heartbeat()
    assert service.scheduler.core.board.build().counters["malformed_messages"] == len(messages)
    worker.gate.set()
    rids = [f"r{index}" for index in range(4)]
    await detokenizer.until(lambda: detokenizer.finished(*rids))
    for index in range(4):
        assert detokenizer.streams[f"r{index}"].tokens == generate(tokens(40, seed=index), 20)
    assert worker.error is None


async def test_requests_that_make_no_sense_are_refused_and_disturb_nobody(house: House) -> None:
    """What decodes but is wrong in its meaning: token ids out of range, odd lengths, names that do not exist."""
    service = await house.scheduler()
    worker = await house.worker()
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    frontend.submit("r0", tokens(40, seed=1), 30)
    with raw_dealer(house.endpoints["t"], b"evil/2") as raw:
        for message in mutated_requests(random.Random(5), 300):
            raw.send_multipart(message)
        raw.send(msgspec.msgpack.encode(Ping(1)))
        await detokenizer.until(lambda: detokenizer.finished("r0"))
        await settled(house.endpoints["t"], ToTokenizer)
    assert service.scheduler is not None
    assert service.scheduler.core.metrics.counters["internal_errors"] == 0
    assert detokenizer.streams["r0"].tokens == generate(tokens(40, seed=1), 30)
    assert worker.error is None


async def test_a_frame_beyond_every_limit_costs_its_sender_the_connection(house: House) -> None:
    await house.scheduler()
    await house.worker()
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    with raw_dealer(house.endpoints["t"], b"evil/3") as raw:
        monitor = raw.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        raw.setsockopt(zmq.LINGER, 0)
        raw.send(bytes(MAX_MESSAGE_BYTES + 1))
        assert await asyncio.to_thread(monitor.poll, PATIENCE_S * 1000)
        raw.disable_monitor()
        monitor.close()
    frontend.submit("r0", tokens(40), 10)
    await detokenizer.until(lambda: detokenizer.finished("r0"))
    assert detokenizer.streams["r0"].tokens == generate(tokens(40), 10)


async def test_a_worker_survives_whatever_its_scheduler_sends(tmp_path: Path) -> None:
    """The socket of a worker: commands that are none are dropped, the first real one is executed."""
    at_scheduler: asyncio.Queue[bytes] = asyncio.Queue()
    server: Server[Any] = Server(f"ipc://{tmp_path}/w", FromWorker, lambda who, *_: at_scheduler.put_nowait(who))
    received: asyncio.Queue[Any] = asyncio.Queue()
    worker: Client[Any] = Client(f"ipc://{tmp_path}/w", "w/1", ToWorker, lambda m, _: received.put_nowait(m))
    worker.on_writable = lambda: worker.try_send(Heartbeat("w", 1))
    worker.on_writable()
    try:
        identity = await asyncio.wait_for(at_scheduler.get(), PATIENCE_S)
        rng = random.Random(3)
        messages = random_messages(rng, 200) + undecodable(ToWorker, truncated_messages(StepCommand(1, 1)))
        messages += undecodable(ToWorker, foreign_messages(ToWorker, rng)) + oversized_messages()
        for message in messages:
            server._socket.send_multipart([identity, *message])
        server.send(identity, WorkerWelcome(4))
        assert await asyncio.wait_for(received.get(), PATIENCE_S) == WorkerWelcome(4)
        assert worker.malformed == len(messages)
    finally:
        worker.close()
        server.close()


async def test_the_detokenizer_goes_on_as_if_nothing_had_come(tmp_path: Path, byte_level_folder: Path) -> None:
    """Hostile bytes on both of its sockets while a text is under way."""
    greeted: asyncio.Queue[bytes] = asyncio.Queue()
    scheduler: Server[Any] = Server(f"ipc://{tmp_path}/s", FromDetokenizer, lambda who, *_: greeted.put_nowait(who))
    config = DetokenizerConfig(
        model_path=str(byte_level_folder), bind=f"ipc://{tmp_path}/text", scheduler=f"ipc://{tmp_path}/s"
    )
    service = Detokenizer(config)
    await service.start()
    text: asyncio.Queue[Any] = asyncio.Queue()
    tokenizer: Client[Any] = Client(config.bind, "t/1", DetokenizerToTokenizer, lambda m, _: text.put_nowait(m))
    tokenizer.on_writable = lambda: tokenizer.try_send(Hello("tokenizer", "t", 1))
    tokenizer.on_writable()
    rng = random.Random(11)
    hostile = random_messages(rng, 200) + oversized_messages()
    from_scheduler = hostile + undecodable(
        StreamOpen | TokenChunks | Ping | Pong, truncated_messages(StreamOpen("r", "t/1", epoch=1))
    )
    at_text = hostile + undecodable(TokenizerToDetokenizer, foreign_messages(TokenizerToDetokenizer, rng))
    try:
        assert await asyncio.wait_for(text.get(), PATIENCE_S) == Pong(0)
        identity = await asyncio.wait_for(greeted.get(), PATIENCE_S)
        scheduler.send(identity, StreamOpen("r", "t/1", epoch=1))
        with raw_dealer(config.bind, b"evil/1") as raw:
            for message in at_text:
                raw.send_multipart(message)
            for message in from_scheduler:
                scheduler._socket.send_multipart([identity, *message])
            await all_counted(service._server, len(at_text))
        finish = Finish(FinishReason.LENGTH)
        scheduler.send(identity, TokenChunks((TokenChunk("r", 0, ints.pack([40, 41]), finish),), 1))
        chunks = await asyncio.wait_for(text.get(), PATIENCE_S)
        assert isinstance(chunks, TextChunks)
        assert ints.unpack(chunks.chunks[0].token_ids).tolist() == [40, 41]
        assert service._server.malformed == len(at_text)
        assert service._link.malformed == len(from_scheduler)
    finally:
        tokenizer.close()
        await service.close()
        scheduler.close()
