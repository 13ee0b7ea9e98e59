"""Clients that leave, half-leave or stop reading: the request ends at once, whatever state it is in."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

import pytest

from services.tokenizer.service import TokenizerService
from tests.tokenizer.conftest import Launcher
from tests.tokenizer.fake_backend import FakeBackend, Script, endless

PATHS = {
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 100}},
    "/v1/completions": {"prompt": "hello", "max_tokens": 100},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 100},
}


class RawClient:
    """One request on a bare socket."""

    def __init__(self, url: str, receive_buffer: int = 0) -> None:
        host, port = url.removeprefix("http://").split(":")
        self._address = (host, int(port))
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.setblocking(False)

    async def send(self, path: str, body: dict[str, Any], cut: int | None = None) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self.socket, self._address)
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        await loop.sock_sendall(self.socket, (head.encode() + data)[:cut])

    async def read_until(self, text: bytes, times: int = 1) -> bytes:
        data = b""
        async with asyncio.timeout(10):
            while data.count(text) < times:
                piece = await asyncio.get_running_loop().sock_recv(self.socket, 65536)
                assert piece, data
                data += piece
        return data

    def leave(self, how: str) -> None:
        if how == "half":
            self.socket.shutdown(socket.SHUT_WR)
            return
        if how == "reset":
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def held_script() -> Script:
    script = Script([270] * 100)
    script.gate = asyncio.Event()
    return script


async def until_clean(service: TokenizerService, backend: FakeBackend, count: int) -> None:
    """All streams gone here and there, every one aborted exactly once."""
    await backend.until(lambda: len(backend.aborted) >= count and backend.live == 0)
    assert len(service.context.frontend.streams) == 0
    assert len(set(backend.aborted)) == len(backend.aborted) == count


@pytest.mark.parametrize("how", ["close", "reset", "half"])
@pytest.mark.parametrize("path", sorted(PATHS))
async def test_gone_before_the_first_token(
    service: TokenizerService, backend: FakeBackend, path: str, how: str
) -> None:
    """Queued or prefilling: the frontend cannot tell, and need not."""
    backend.script = lambda request: held_script()
    for stream in (True, False):
        backend.aborted.clear()
        client = RawClient(service.url)
        await client.send(path, {**PATHS[path], "stream": stream})
        await backend.until(lambda: backend.live == 1)
        if stream:
            await client.read_until(b"\r\n\r\n")
        client.leave(how)
        await until_clean(service, backend, 1)
        client.socket.close()


@pytest.mark.parametrize("how", ["close", "reset", "half"])
@pytest.mark.parametrize("path", sorted(PATHS))
async def test_gone_while_decoding(service: TokenizerService, backend: FakeBackend, path: str, how: str) -> None:
    backend.script = endless
    client = RawClient(service.url)
    await client.send(path, {**PATHS[path], "stream": True})
    await client.read_until(b"data: ", times=3)
    client.leave(how)
    await until_clean(service, backend, 1)
    client.socket.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_all_choices_of_a_request_end(service: TokenizerService, backend: FakeBackend, stream: bool) -> None:
    backend.script = lambda request: held_script()
    body = {"text": ["hello", "world"], "sampling_params": {"n": 3}, "rid": "mine", "stream": stream}
    client = RawClient(service.url)
    await client.send("/generate", body)
    await backend.until(lambda: backend.live == 6)
    client.leave("close")
    await until_clean(service, backend, 6)


async def test_many_leave_at_once_and_the_next_is_served(service: TokenizerService, backend: FakeBackend) -> None:
    backend.script = lambda request: held_script()
    clients = [RawClient(service.url) for _ in range(40)]
    for client in clients:
        await client.send("/generate", {**PATHS["/generate"], "stream": True})
    await backend.until(lambda: backend.live == 40)
    for client in clients:
        client.leave("reset")
    await until_clean(service, backend, 40)
    backend.script = backend.default_script
    last = RawClient(service.url)
    await last.send("/generate", {**PATHS["/generate"], "stream": True})
    await last.read_until(b"[DONE]")
    last.socket.close()
    assert len(backend.aborted) == 40


async def test_gone_while_sending_the_body(service: TokenizerService, backend: FakeBackend) -> None:
    client = RawClient(service.url)
    await client.send("/generate", PATHS["/generate"], cut=-10)
    client.leave("close")
    other = RawClient(service.url)
    await other.send("/generate", {**PATHS["/generate"], "stream": True})
    await other.read_until(b"[DONE]")
    other.socket.close()
    assert len(backend.requests) == 1
    assert backend.aborted == []


async def test_a_body_that_never_comes(launch: Launcher, backend: FakeBackend) -> None:
    service = await launch(client_stall_timeout=0.2)
    client = RawClient(service.url)
    await client.send("/generate", PATHS["/generate"], cut=-10)
    answer = await client.read_until(b"request_timeout")
    assert answer.startswith(b"HTTP/1.1 408")
    client.socket.close()


async def test_no_abort_after_a_normal_end(service: TokenizerService, backend: FakeBackend) -> None:
    client = RawClient(service.url)
    await client.send("/generate", {**PATHS["/generate"], "stream": True})
    await client.read_until(b"[DONE]")
    client.leave("reset")
    await backend.until(lambda: backend.acked)
    assert backend.aborted == []


@pytest.mark.timeout(60)
async def test_a_client_that_reads_nothing(launch: Launcher, backend: FakeBackend) -> None:
    """The socket's buffers fill, then the connection is given up; memory stays that of the tokens."""
    service = await launch(client_stall_timeout=1.0, heartbeat_interval=0.2)

    backend.script = endless
    stalled = RawClient(service.url, receive_buffer=4096)
    await stalled.send("/generate", {**PATHS["/generate"], "stream": True})
    await backend.until(lambda: backend.live == 1)
    beat = asyncio.create_task(beats(service))
    try:
        await backend.until(lambda: len(backend.aborted) == 1 and backend.live == 0, seconds=40)
    finally:
        beat.cancel()
    assert len(service.context.frontend.streams) == 0
    stalled.socket.close()


async def beats(service: TokenizerService) -> None:
    """The process's heartbeat, which tests own."""
    while True:
        service.heartbeat()
        await asyncio.sleep(0.2)


async def test_a_slow_reader_gets_everything(service: TokenizerService, backend: FakeBackend) -> None:
    backend.script = lambda request: Script([270] * 100)
    client = RawClient(service.url, receive_buffer=4096)
    await client.send("/generate", {**PATHS["/generate"], "stream": True})
    await backend.until(lambda: backend.live == 0 and backend.requests)
    data = await client.read_until(b"[DONE]")
    assert b'"completion_tokens":100' in data
    client.socket.close()
    assert backend.aborted == []
