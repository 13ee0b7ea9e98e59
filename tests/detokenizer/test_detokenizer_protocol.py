"""The service over real sockets, between a scheduler and tokenizers that are played by the test."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from services.detokenizer.detokenizer import Detokenizer
from services.detokenizer.vocabulary import Vocabulary
from shared import ints
from shared.config import DetokenizerConfig
from shared.messages.control import Heartbeat, Hello, Ping, Pong
from shared.messages.edges import DetokenizerToTokenizer, FromDetokenizer
from shared.messages.stream import (
    Finish,
    FinishReason,
    StopMatched,
    StreamOpen,
    TextChunk,
    TextChunks,
    TokenChunk,
    TokenChunks,
)
from shared.transport import Client, Server

TIMEOUT = 10
DONE = Finish(FinishReason.LENGTH)


class Scheduler:
    """One life of a scheduler as the detokenizer sees it."""

    def __init__(self, endpoint: str, epoch: int) -> None:
        self.epoch = epoch
        self.identity = b""
        self.hellos: asyncio.Queue[Hello] = asyncio.Queue()
        self.stops: asyncio.Queue[StopMatched] = asyncio.Queue()
        self.heartbeats: asyncio.Queue[Heartbeat] = asyncio.Queue()
        self.pongs: asyncio.Queue[int] = asyncio.Queue()
        self.answer_hello = True
        self.server: Server[Any] = Server(endpoint, FromDetokenizer, self._on_message)

    def _on_message(self, identity: bytes, message: Any, frames: list[bytes]) -> None:
        match message:
            case Hello():
                self.identity = identity
                self.hellos.put_nowait(message)
                if self.answer_hello:
                    self.server.send(identity, Pong(0))
            case StopMatched():
                self.stops.put_nowait(message)
            case Heartbeat():
                self.heartbeats.put_nowait(message)
            case Pong():
                self.pongs.put_nowait(message.nonce)

    async def settled(self) -> None:
        """Until the service has handled everything sent so far."""
        self.send(Ping(1))
        assert await asyncio.wait_for(self.pongs.get(), TIMEOUT) == 1

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.server.send(self.identity, message)

    def open(self, request_id: str, frontend: str = "t/1", **fields: Any) -> None:
        self.send(StreamOpen(request_id, frontend, epoch=self.epoch, **fields))

    def tokens(self, request_id: str, offset: int, ids: list[int], finish: Finish | None = None) -> None:
        self.send(TokenChunks((TokenChunk(request_id, offset, ints.pack(ids), finish),), self.epoch))


class Frontend:
    """One tokenizer: says hello, collects text."""

    def __init__(self, endpoint: str, identity: str = "t/1") -> None:
        self.chunks: asyncio.Queue[TextChunk] = asyncio.Queue()
        self.epochs: set[int] = set()
        self.answered = asyncio.Event()
        self._hello = Hello("tokenizer", identity.split("/")[0], int(identity.split("/")[1]))
        self.client: Client[Any] = Client(endpoint, identity, DetokenizerToTokenizer, self._on_message)
        self.client.on_writable = self._introduce
        self._introduce()

    def _introduce(self) -> None:
        self.client.try_send(self._hello)

    def _on_message(self, message: Any, frames: list[bytes]) -> None:
        if isinstance(message, Pong):
            self.answered.set()
        else:
            assert isinstance(message, TextChunks)
            self.epochs.add(message.epoch)
            for chunk in message.chunks:
                self.chunks.put_nowait(chunk)

    async def until_done(self, *request_ids: str) -> dict[str, list[TextChunk]]:
        """All chunks up to the last one of each of these requests."""
        found: dict[str, list[TextChunk]] = {request_id: [] for request_id in request_ids}
        while not all(chunks and chunks[-1].finish is not None for chunks in found.values()):
            chunk = await asyncio.wait_for(self.chunks.get(), TIMEOUT)
            found[chunk.request_id].append(chunk)
        return found


class House:
    """The service under test and everything that must be closed."""

    def __init__(self, folder: Path, sockets: Path) -> None:
        self.scheduler_endpoint = f"ipc://{sockets}/s"
        self.config = DetokenizerConfig(
            service_id="d", scheduler=self.scheduler_endpoint, bind=f"ipc://{sockets}/d", model_path=str(folder)
        )
        self.service = Detokenizer(self.config)
        self._close: list[Callable[[], None]] = []

    def scheduler(self, epoch: int = 1) -> Scheduler:
        scheduler = Scheduler(self.scheduler_endpoint, epoch)
        self._close.append(scheduler.server.close)
        return scheduler

    async def frontend(self, identity: str = "t/1") -> Frontend:
        frontend = Frontend(self.service.endpoint, identity)
        self._close.append(frontend.client.close)
        await asyncio.wait_for(frontend.answered.wait(), TIMEOUT)
        return frontend

    async def close(self) -> None:
        await self.service.close()
        for close in self._close:
            close()


@pytest.fixture
async def house(byte_level_folder: Path, tmp_path: Path) -> AsyncIterator[House]:
    house = House(byte_level_folder, tmp_path)
    yield house
    await house.close()


async def started(house: House) -> tuple[Scheduler, Frontend]:
    scheduler = house.scheduler()
    await house.service.start()
    hello = await asyncio.wait_for(scheduler.hellos.get(), TIMEOUT)
    assert (hello.service, hello.service_id, hello.endpoint) == ("detokenizer", "d", house.service.endpoint)
    return scheduler, await house.frontend()


def encode(vocabulary: Vocabulary, text: str) -> list[int]:
    return vocabulary.tokenizer.encode(text).ids


async def test_tokens_become_text(house: House, byte_level: Vocabulary) -> None:
    scheduler, frontend = await started(house)
    ids = encode(byte_level, "hello 你 🫠!")
    scheduler.open("a")
    for offset, token in enumerate(ids):
        scheduler.tokens("a", offset, [token], DONE if offset == len(ids) - 1 else None)
    chunks = (await frontend.until_done("a"))["a"]
    assert "".join(chunk.text for chunk in chunks) == "hello 你 🫠!"
    assert len(chunks) == len(ids)
    assert frontend.epochs == {1}
    assert house.service.streams == {}


async def test_a_stop_string_reaches_both_sides_and_later_tokens_are_ignored(
    house: House, byte_level: Vocabulary
) -> None:
    scheduler, frontend = await started(house)
    ids = encode(byte_level, "alpha beta gamma delta")
    scheduler.open("a", stop_strings=("beta gamma",))
    scheduler.open("b", stream=False, stop_strings=("gamma",))
    for offset, token in enumerate(ids):
        scheduler.tokens("a", offset, [token])
        scheduler.tokens("b", offset, [token])
    found = await frontend.until_done("a", "b")
    assert "".join(chunk.text for chunk in found["a"]) == "alpha "
    assert "".join(chunk.text for chunk in found["b"]) == "alpha beta "
    count = len("alpha beta gamma")
    assert found["a"][-1].finish == Finish(FinishReason.STOP, matched_string="beta gamma")
    assert found["a"][-1].num_output_tokens == count
    assert len(found["b"]) == 1
    stops = [await asyncio.wait_for(scheduler.stops.get(), TIMEOUT) for _ in range(2)]
    assert {stop.request_id: stop for stop in stops} == {
        "a": StopMatched("a", count, "beta gamma", 1),
        "b": StopMatched("b", count, "gamma", 1),
    }
    scheduler.open("c")
    scheduler.tokens("c", 0, ids[:1], DONE)
    assert (await frontend.until_done("c"))["c"][0].text == "a"


async def test_text_goes_to_the_frontend_that_asked(house: House, byte_level: Vocabulary) -> None:
    scheduler, first = await started(house)
    second = await house.frontend("t/2")
    scheduler.open("a", "t/1")
    scheduler.open("b", "t/2")
    ids = encode(byte_level, "hi")
    chunks = tuple(TokenChunk(name, 0, ints.pack(ids), DONE) for name in ("a", "b"))
    scheduler.send(TokenChunks(chunks, 1))
    await first.until_done("a")
    await second.until_done("b")


async def test_a_frontend_that_was_cut_off_gets_the_rest_in_one_piece(house: House, byte_level: Vocabulary) -> None:
    scheduler, frontend = await started(house)
    ids = encode(byte_level, "abcdefgh")
    scheduler.open("a")
    scheduler.tokens("a", 0, ids[:2])
    assert (await asyncio.wait_for(frontend.chunks.get(), TIMEOUT)).text == "ab"
    gone = asyncio.Event()
    house.service._server.watch(gone.set)
    frontend.client.close()
    await asyncio.wait_for(gone.wait(), TIMEOUT)
    for offset in range(2, 8):
        scheduler.tokens("a", offset, ids[offset : offset + 1], DONE if offset == 7 else None)
    await scheduler.settled()
    assert house.service.streams == {}
    again = await house.frontend()
    chunks = (await again.until_done("a"))["a"]
    assert [chunk.text for chunk in chunks] == ["cdefgh"]
    assert chunks[0].offset == 2


def read_text(socket: zmq.Socket[bytes], total: int) -> str:
    """Everything this frontend is sent, until it has `total` tokens; blocks."""
    text, count = "", 0
    while count < total:
        assert socket.poll(TIMEOUT * 1000)
        message = msgspec.msgpack.decode(socket.recv(), type=DetokenizerToTokenizer)
        for chunk in message.chunks if isinstance(message, TextChunks) else ():
            assert chunk.offset == count
            text += chunk.text
            count += ints.count(chunk.token_ids)
    return text


@pytest.mark.timeout(60)
async def test_a_frontend_that_does_not_read_delays_nobody_and_loses_nothing(
    house: House, byte_level: Vocabulary
) -> None:
    scheduler, quick = await started(house)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    slow = context.socket(zmq.DEALER)
    slow.setsockopt(zmq.RCVHWM, 1)
    slow.setsockopt(zmq.IDENTITY, b"slow/1")
    slow.connect(house.service.endpoint)
    try:
        slow.send(msgspec.msgpack.encode(Hello("tokenizer", "slow", 1)))
        scheduler.open("s", "slow/1")
        scheduler.open("q", "t/1")
        token = encode(byte_level, "x")
        total = 8000
        for offset in range(total):
            last = DONE if offset == total - 1 else None
            scheduler.send(TokenChunks(tuple(TokenChunk(name, offset, ints.pack(token), last) for name in "sq"), 1))
            if offset % 100 == 0:
                await asyncio.sleep(0)
        assert "".join(c.text for c in (await quick.until_done("q"))["q"]) == "x" * total
        assert house.service._outbox.pending == 1  # thousands of chunks, merged
        assert await asyncio.to_thread(read_text, slow, total) == "x" * total
    finally:
        slow.close(linger=0)


async def test_a_new_scheduler_life_reopens_streams_and_rederives_a_lost_stop(
    house: House, byte_level: Vocabulary
) -> None:
    scheduler, frontend = await started(house)
    ids = encode(byte_level, "say END now")
    scheduler.open("a", stop_strings=("zzz",))
    scheduler.tokens("a", 0, ids[:3])
    await asyncio.wait_for(frontend.chunks.get(), TIMEOUT)
    first_identity = scheduler.identity
    scheduler.server.close()

    new = house.scheduler(epoch=2)
    await asyncio.wait_for(new.hellos.get(), TIMEOUT)
    assert new.identity != first_identity
    assert house.service.streams == {}
    new.open("a", output_ids=ints.pack(ids[:3]), stop_strings=("zzz",))
    new.open("b", output_ids=ints.pack(ids), stop_strings=("END",))
    new.tokens("a", 3, ids[3:], DONE)
    found = await frontend.until_done("a", "b")
    assert [(c.offset, c.text, c.reopened) for c in found["a"]] == [(0, "say", True), (3, " END now", False)]
    assert [(c.offset, c.text, c.reopened) for c in found["b"]] == [(0, "say ", True)]
    assert (await asyncio.wait_for(new.stops.get(), TIMEOUT)).num_output_tokens == len("say END")


async def test_messages_of_an_old_epoch_are_dropped(house: House, byte_level: Vocabulary) -> None:
    scheduler, frontend = await started(house)
    ids = encode(byte_level, "ab")
    scheduler.epoch = 5
    scheduler.open("a")
    scheduler.epoch = 4
    scheduler.open("old", output_ids=ints.pack(ids))
    scheduler.tokens("a", 0, ids[:1])
    scheduler.epoch = 5
    scheduler.tokens("a", 0, ids, DONE)
    chunks = (await frontend.until_done("a"))["a"]
    assert [chunk.text for chunk in chunks] == ["ab"]
    assert frontend.epochs == {5}


async def test_missing_tokens_make_the_scheduler_tell_everything_again(house: House, byte_level: Vocabulary) -> None:
    scheduler, frontend = await started(house)
    ids = encode(byte_level, "abc")
    scheduler.open("a")
    scheduler.tokens("a", 2, ids[2:])
    first_identity = scheduler.identity
    await asyncio.wait_for(scheduler.hellos.get(), TIMEOUT)
    assert scheduler.identity != first_identity
    scheduler.open("a", output_ids=ints.pack(ids), finish=DONE)
    chunk = (await frontend.until_done("a"))["a"][0]
    assert (chunk.text, chunk.reopened, chunk.finish) == ("abc", True, DONE)


async def test_hello_is_repeated_until_it_is_answered_and_when_it_was_forgotten(house: House) -> None:
    scheduler = house.scheduler()
    scheduler.answer_hello = False
    await house.service.start()
    for _ in range(3):
        await asyncio.wait_for(scheduler.hellos.get(), TIMEOUT)
        house.service.heartbeat()
        await asyncio.wait_for(scheduler.heartbeats.get(), TIMEOUT)
    scheduler.answer_hello = True
    house.service.heartbeat()
    await asyncio.wait_for(scheduler.heartbeats.get(), TIMEOUT)
    scheduler.send(Pong(0, healthy=False, detail="unknown: say hello"))
    while not scheduler.hellos.empty():
        scheduler.hellos.get_nowait()
    await asyncio.wait_for(scheduler.hellos.get(), TIMEOUT)


async def test_the_gauge_counts_messages_of_this_epoch(house: House, byte_level: Vocabulary) -> None:
    scheduler, frontend = await started(house)
    for epoch, count in ((1, 3), (2, 1)):
        scheduler.epoch = epoch
        scheduler.open("a")
        for offset in range(count):
            scheduler.tokens("a", offset, encode(byte_level, "x"), DONE if offset == count - 1 else None)
        await frontend.until_done("a")
        house.service.heartbeat()
        beat = await asyncio.wait_for(scheduler.heartbeats.get(), TIMEOUT)
        assert beat.gauges["chunks_handled"] == count


async def test_pings_are_answered_on_both_edges(house: House) -> None:
    scheduler, _ = await started(house)
    answers: asyncio.Queue[Any] = asyncio.Queue()
    probe: Client[Any] = Client(
        house.service.endpoint, "probe/1", DetokenizerToTokenizer, lambda m, f: answers.put_nowait(m)
    )
    probe.on_writable = lambda: probe.try_send(Ping(9))
    try:
        probe.try_send(Ping(9))
        assert await asyncio.wait_for(answers.get(), TIMEOUT) == Pong(9)
    finally:
        probe.close()
    assert scheduler.server.malformed == 0


async def test_drain_hands_over_what_is_ready(house: House, byte_level: Vocabulary) -> None:
    scheduler, frontend = await started(house)
    scheduler.open("a", stream=False)
    scheduler.tokens("a", 0, encode(byte_level, "hi"), DONE)
    assert (await frontend.until_done("a"))["a"][0].text == "hi"
    await asyncio.wait_for(house.service.drain(), TIMEOUT)


async def test_as_a_process_it_needs_no_torch_and_ends_on_sigterm(byte_level_folder: Path, tmp_path: Path) -> None:
    scheduler = Scheduler(f"ipc://{tmp_path}/s", 1)
    code = "import sys, services.detokenizer.__main__ as m; r = m.main(); print('torch' in sys.modules); sys.exit(r)"
    environment = os.environ | {
        "RADIXFLEET_MODEL_PATH": str(byte_level_folder),
        "RADIXFLEET_SCHEDULER": f"ipc://{tmp_path}/s",
        "RADIXFLEET_BIND": f"ipc://{tmp_path}/d",
    }
    process = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        await asyncio.wait_for(scheduler.hellos.get(), 30)
        process.send_signal(signal.SIGTERM)
        out, _ = await asyncio.to_thread(process.communicate, timeout=15)
        assert (process.returncode, out.strip()) == (0, "False")
    finally:
        process.kill()
        process.wait()
        scheduler.server.close()
