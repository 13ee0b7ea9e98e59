"""Real sockets: typed both ways, nothing dropped in silence, the dead are noticed, garbage hurts nobody."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from shared.messages.control import Hello, Ping, Pong
from shared.messages.edges import FromDetokenizer, FromTokenizer, ToTokenizer
from shared.messages.request import AbortRequest, StreamAck
from shared.transport import HIGH_WATER_MARK, Client, PeerBusy, PeerGone, Server

TIMEOUT = 5


class Box:
    """Collects what a socket delivers."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, *items: Any) -> None:
        self.queue.put_nowait(items)

    async def get(self) -> Any:
        return await asyncio.wait_for(self.queue.get(), TIMEOUT)


@pytest.fixture
async def sockets(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    opened: list[Any] = []

    def keep(socket: Any) -> Any:
        opened.append(socket)
        return socket

    keep.endpoint = f"ipc://{tmp_path}/s"  # type: ignore[attr-defined]
    yield keep
    for socket in opened:
        socket.close()


async def connected(keep: Any, identity: str = "a/1") -> tuple[Any, Box, Any, Box]:
    at_server, at_client = Box(), Box()
    server = keep(Server(keep.endpoint, FromTokenizer, at_server.put))
    client = keep(Client(keep.endpoint, identity, ToTokenizer, at_client.put))
    await send_when_connected(client, Hello("tokenizer", "a", 1))
    assert (await at_server.get())[0] == identity.encode()
    return server, at_server, client, at_client


async def send_when_connected(client: Any, message: Any) -> None:
    connected = asyncio.Event()
    client.on_writable = connected.set
    while not client.try_send(message):
        await asyncio.wait_for(connected.wait(), TIMEOUT)
        connected.clear()


async def test_both_directions_with_frames(sockets: Any) -> None:
    server, at_server, client, at_client = await connected(sockets)
    client.send(Ping(7), b"one", b"two")
    assert await at_server.get() == (b"a/1", Ping(7), [b"one", b"two"])
    server.send(b"a/1", Pong(7), b"x" * 200_000)
    message, frames = await at_client.get()
    assert message == Pong(7)
    assert frames == [b"x" * 200_000]


async def test_a_burst_larger_than_one_drain_arrives_whole_and_in_order(sockets: Any) -> None:
    server, at_server, client, _ = await connected(sockets)
    for n in range(2000):
        client.send(Ping(n))
    assert [(await at_server.get())[1].nonce for _ in range(2000)] == list(range(2000))


async def test_unknown_peer_is_an_error(sockets: Any) -> None:
    server, *_ = await connected(sockets)
    with pytest.raises(PeerGone):
        server.send(b"nobody/1", Pong(1))


async def test_a_closed_peer_is_noticed(sockets: Any) -> None:
    server, _, client, _ = await connected(sockets)
    gone = asyncio.Event()
    server.watch(gone.set)
    client.close()
    await asyncio.wait_for(gone.wait(), TIMEOUT)
    with pytest.raises(PeerGone):
        server.send(b"a/1", Pong(1))


async def test_the_client_notices_a_dead_server_and_the_next_one(sockets: Any) -> None:
    server, _, client, at_client = await connected(sockets)
    gone = asyncio.Event()
    client.watch(gone.set)
    server.close()
    await asyncio.wait_for(gone.wait(), TIMEOUT)
    again = Box()
    second = sockets(Server(sockets.endpoint, FromTokenizer, again.put))
    await send_when_connected(client, Ping(3))
    assert (await again.get())[1] == Ping(3)
    second.send(b"a/1", Pong(3))
    assert (await at_client.get())[0] == Pong(3)


async def test_a_peer_that_does_not_read_is_busy_not_dropped(sockets: Any) -> None:
    at_server = Box()
    server = sockets(Server(sockets.endpoint, FromTokenizer, at_server.put))
    frozen = zmq.Context.instance().socket(zmq.DEALER)
    frozen.setsockopt(zmq.IDENTITY, b"frozen/1")
    frozen.setsockopt(zmq.RCVHWM, 10)
    frozen.setsockopt(zmq.LINGER, 0)
    frozen.connect(sockets.endpoint)
    try:
        import msgspec

        frozen.send(msgspec.msgpack.encode(Ping(1)))
        await at_server.get()
        retried = asyncio.Event()
        server.on_writable = retried.set
        sent = 0
        with pytest.raises(PeerBusy):
            for sent in range(4 * HIGH_WATER_MARK):
                server.send(b"frozen/1", Pong(sent), b"x" * 10_000)
        await asyncio.wait_for(retried.wait(), TIMEOUT)
        for n in range(sent):
            header, _ = frozen.recv_multipart()
            assert msgspec.msgpack.decode(header, type=Pong | Ping) == Pong(n)
    finally:
        frozen.close()


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xc1",
        b"\x00" * 1000,
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x92\x02",
        b"\xdf\xff\xff\xff\xff",
        b"\x9f" * 100_000,
    ],
)
async def test_garbage_is_dropped_and_counted(sockets: Any, garbage: bytes) -> None:
    server, at_server, client, _ = await connected(sockets)
    client._socket.send_multipart([garbage])
    client.send(Ping(5))
    assert (await at_server.get())[1] == Ping(5)
    assert server.malformed == 1


async def test_a_message_of_another_edge_is_refused(sockets: Any) -> None:
    at_server = Box()
    server = sockets(Server(sockets.endpoint, FromDetokenizer, at_server.put))
    client = sockets(Client(sockets.endpoint, "a/1", ToTokenizer, lambda *_: None))
    await send_when_connected(client, AbortRequest(("x",)))
    client.send(StreamAck(("x",)))
    client.send(Ping(1))
    assert (await at_server.get())[1] == Ping(1)
    assert server.malformed == 2
