"""A reader that stops at the very last write is cut off like any other."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import httpx

from tests.tokenizer.conftest import Launcher
from tests.tokenizer.fake_backend import FakeBackend, Script
from tests.tokenizer.test_disconnects import RawClient, beats


async def test_an_answer_that_has_ended_is_not_kept_for_a_reader_that_stops(
    launch: Launcher, backend: FakeBackend, tmp_path: Path
) -> None:
    listener = socket.socket(socket.AF_UNIX)  # no help from the kernel here
    path = os.path.relpath(tmp_path / "s")
    listener.bind(path)
    listener.listen()
    service = await launch(client_stall_timeout=0.5, http_fd=listener.detach())
    backend.script = lambda request: Script([270], texts=["x" * (8 << 20)])  # all of it and its end in one write
    client = RawClient("http://x:1")
    client.socket.close()
    client.socket = socket.socket(socket.AF_UNIX)
    client.socket.setblocking(False)
    client._address = path  # type: ignore[assignment]
    await client.send("/v1/completions", {"prompt": "hello", "stream": True, "max_tokens": 1})
    await backend.until(lambda: backend.acked)
    assert len(service.context.frontend.streams) == 1
    beat = asyncio.create_task(beats(service))
    async with asyncio.timeout(30):
        while len(service.context.frontend.streams):
            await asyncio.sleep(0.05)
    beat.cancel()
    assert service.context.measurements.active == 0
    client.socket.close()
    backend.script = backend.default_script
    transport = httpx.AsyncHTTPTransport(uds=path)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as other:
        assert (await other.post("/generate", json={"text": "hello"})).status_code == 200
