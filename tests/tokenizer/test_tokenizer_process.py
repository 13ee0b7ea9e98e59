"""The service as a process: its lines, its imports, its end."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.tokenizer.fake_backend import FakeBackend, Script
from tests.tokenizer.sse_reader import events


def test_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, services.tokenizer.__main__\n"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in done.stdout
    assert "transformers" not in done.stdout


async def start_process(backend: FakeBackend, model_folder: Path, *flags: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.tokenizer",
        *("--model-path", str(model_folder), "--scheduler", backend.scheduler, "--port", "0", *flags),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


async def read_until(process: asyncio.subprocess.Process, pattern: str) -> str:
    assert process.stderr is not None
    text = ""
    async with asyncio.timeout(60):
        while not re.search(pattern, text):
            line = await process.stderr.readline()
            assert line, text
            text += line.decode()
    return text


@pytest.mark.timeout(120)
async def test_a_life(backend: FakeBackend, model_folder: Path) -> None:
    process = await start_process(backend, model_folder)
    text = await read_until(process, r'"event": "ready"|\bready\b.*url')
    for line in (
        rf"Started server process \[{process.pid}\]",
        r"Waiting for application startup\.",
        r"Application startup complete\.",
        r"Uvicorn running on http://127\.0\.0\.1:\d+ \(Press CTRL\+C to quit\)",
    ):
        assert re.search(line, text), text
    [url] = re.findall(r"http://127\.0\.0\.1:\d+", text)[:1]
    script = Script(list(range(260, 270)))
    script.pause_after = 3
    backend.script = lambda request: script
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        running = asyncio.ensure_future(client.post("/generate", json={"text": "x", "stream": True}))
        await backend.until(lambda: backend.live == 1)
        process.send_signal(signal.SIGTERM)
        await read_until(process, "draining")
        assert (await client.post("/generate", json={"text": "y"})).status_code == 503
        assert (await client.get("/ready")).status_code == 503
        script.resume.set()
        assert len(events((await running).text)[-1]["output_ids"]) == 10
    async with asyncio.timeout(20):
        assert await process.wait() == 0
    assert backend.aborted == []


@pytest.mark.timeout(60)
async def test_a_port_that_is_taken(backend: FakeBackend, model_folder: Path) -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    process = await start_process(backend, model_folder, "--port", str(port))
    text = await read_until(process, "in use")
    assert "service failed" in text
    assert await process.wait() == 1
    server.close()


@pytest.mark.timeout(60)
async def test_a_folder_without_a_tokenizer(backend: FakeBackend, tmp_path: Path) -> None:
    process = await start_process(backend, tmp_path)
    await read_until(process, r"no tokenizer\.json")
    assert await process.wait() == 1
