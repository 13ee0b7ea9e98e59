"""Heads without end, bodies beyond memory, readers that stop, random bodies: the door stands and its neighbours run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.tokenizer import http_protocol, schema
from services.tokenizer.errors import ApiError
from services.tokenizer.service import TokenizerService
from services.tokenizer.validation import decode
from tests.tokenizer.conftest import Launcher
from tests.tokenizer.fake_backend import FakeBackend, Script, endless
from tests.tokenizer.test_disconnects import RawClient, beats


async def raw(service: TokenizerService, *pieces: bytes) -> bytes:
    """Send pieces, read until the server closes."""
    host, port = service.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))

    async def read_all() -> bytes:
        data = b""
        with contextlib.suppress(ConnectionResetError):  # what the server did not read makes the kernel reset
            while piece := await reader.read(4096):
                data += piece
        return data

    answer = asyncio.ensure_future(read_all())
    for piece in pieces:
        if answer.done() or writer.is_closing():
            break
        writer.write(piece)
        await asyncio.sleep(0)
    async with asyncio.timeout(10):
        data = await answer
    writer.close()
    return data


async def test_a_head_without_end(service: TokenizerService) -> None:
    data = await raw(service, b"GET /health HTTP/1.1\r\nx: ", *[b"y" * 20_000] * 5)
    assert data[:12] in (b"HTTP/1.1 431", b"")
    data = await raw(service, b"GET /health HTTP/1.1\r\n", *[b"x-%d: y\r\n" % i * 500 for i in range(50)])
    assert data[:12] in (b"HTTP/1.1 431", b"")
    data = await raw(service, b"GET /health HTTP/1.1\r\n", b"x: " + b"y" * 50_000, b"y" * 20_000)
    assert data.startswith(b"HTTP/1.1 431")
    async with httpx.AsyncClient(base_url=service.url) as client:
        assert (await client.get("/health", headers={"x": "y" * 30_000})).status_code == 200


async def test_a_head_that_never_comes(service: TokenizerService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.1)
    assert (await raw(service)).startswith(b"HTTP/1.1 408")
    assert (await raw(service, b"GET /health HT")).startswith(b"HTTP/1.1 408")


async def test_idle_connections_are_kept(service: TokenizerService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two requests there is no head to wait for."""
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.1)
    async with httpx.AsyncClient(base_url=service.url) as client:
        await client.get("/health")
        await asyncio.sleep(0.3)
        await client.get("/health")
        assert len(client._transport._pool.connections) == 1  # type: ignore[attr-defined]


async def test_no_http_at_all(service: TokenizerService) -> None:
    twice = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\n{}"
    chunk = b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n"
    for data in (b"\x00\x01\x02\r\n\r\n", b"GET\r\n\r\n", b"\x16\x03\x01\x02\x00", twice, chunk):
        head, _, body = (await raw(service, data)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert json.loads(body)["error"]["code"] == "invalid_http"
    async with httpx.AsyncClient(base_url=service.url) as client:
        assert (await client.get("/health")).status_code == 200


async def test_no_http_behind_a_request_never_speaks_into_its_answer(
    service: TokenizerService, backend: FakeBackend
) -> None:
    backend.script = endless
    client = RawClient(service.url)
    await client.send("/generate", {"text": "hello", "stream": True, "sampling_params": {"max_new_tokens": 100}})
    await client.read_until(b"data: ")
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(client.socket, b"\x00 no HTTP\r\n\r\n")
    rest = b""
    with contextlib.suppress(ConnectionResetError):
        async with asyncio.timeout(10):
            while piece := await loop.sock_recv(client.socket, 65536):
                rest += piece
    assert b"HTTP/1.1" not in rest
    await backend.until(lambda: len(backend.aborted) == 1 and backend.live == 0)
    client.socket.close()


async def test_memory_for_bodies_is_bounded(service: TokenizerService) -> None:
    service.context.bodies.limit = 1000
    async with httpx.AsyncClient(base_url=service.url) as client:
        answer = await client.post("/generate", json={"text": "x" * 2000})
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        answer = await client.post("/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 1}})
        assert answer.status_code == 200
    assert service.context.bodies.held == 0


@pytest.mark.timeout(60)
async def test_a_stalled_reader_without_help_from_tcp(launch: Launcher, backend: FakeBackend, tmp_path: Path) -> None:
    """Where the kernel does not drop the connection (a unix socket), the heartbeat finds the blocked write."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.path.relpath(tmp_path / "s"))
    listener.listen()
    service = await launch(client_stall_timeout=0.5, http_fd=listener.detach())

    backend.script = endless
    client = RawClient("http://x:1")
    client.socket.close()
    client.socket = socket.socket(socket.AF_UNIX)
    client.socket.setblocking(False)
    client._address = os.path.relpath(tmp_path / "s")  # type: ignore[assignment]
    await client.send("/generate", {"text": "hello", "stream": True, "sampling_params": {"max_new_tokens": 100}})
    await backend.until(lambda: backend.live == 1)
    beat = asyncio.create_task(beats(service))
    await backend.until(lambda: len(backend.aborted) == 1 and backend.live == 0, seconds=40)
    beat.cancel()
    assert len(service.context.frontend.streams) == 0
    client.socket.close()


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["", "user", "text", "json_object", "none", "<|im_end|>", "\x00"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KINDS = {
    "/generate": (schema.GenerateBody, {"text": "hello"}),
    "/v1/completions": (schema.CompletionBody, {"prompt": "hello"}),
    "/v1/chat/completions": (schema.ChatBody, {"messages": [{"role": "user", "content": "hello"}]}),
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A valid body in which some fields are replaced by anything."""
    path = draw(st.sampled_from(sorted(KINDS)))
    kind, valid = KINDS[path]
    names = st.sampled_from([*kind.__struct_encode_fields__, "regex", "unknown"])
    changed = draw(st.dictionaries(names, VALUES, min_size=1, max_size=3))
    if path == "/generate" and draw(st.booleans()):
        params = st.sampled_from(schema.NativeSampling.__struct_encode_fields__)
        changed["sampling_params"] = draw(st.dictionaries(params, VALUES, max_size=3))
    return path, {**valid, **changed}


async def test_random_bodies_never_break_the_door(service: TokenizerService, backend: FakeBackend) -> None:
    """Each is answered with 200 or a 4xx in our envelope."""
    found: list[tuple[str, dict[str, Any]]] = []

    @settings(max_examples=400, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=bodies())
    def collect(case: tuple[str, dict[str, Any]]) -> None:
        found.append(case)

    collect()
    backend.script = lambda request: Script([270, 271][: request.sampling.max_tokens])
    async with httpx.AsyncClient(base_url=service.url, timeout=30) as client:
        for path, body in found:
            try:
                content = json.dumps(body, allow_nan=False)
            except ValueError:
                continue
            answer = await client.post(path, content=content, headers={"content-type": "application/json"})
            about = f"{path} {content} -> {answer.status_code} {answer.text[:300]}"
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, about
            if answer.status_code != 200:
                assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, about
    assert len(service.context.frontend.streams) == 0


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=60))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode(data, schema.ChatBody, {})
    assert caught.value.status == 400
