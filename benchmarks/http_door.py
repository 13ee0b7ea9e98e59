"""What the front door costs: streamed tokens per second of processor time, and gaps beside large prompts.

    python benchmarks/http_door.py [--tokens 20000] [--clients 1,64,512]

Real tokenizer, detokenizer and scheduler processes; a FakeWorker gives tokens as fast as it is asked. Throughput is
tokens over the processor seconds of the tokenizer, of the detokenizer and of both (per core), so that it does not hang
on how many cores the machine shares with the load. The ceiling is the bare ASGI server that sends the same events, one
write for each, with nothing behind it.

The second part runs one stream with a step every 10 ms and sends five prompts of 1 MB at once: they are tokenised and
refused for their length. It prints the largest and p99 gap of the stream, alone and beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import httpx  # noqa: E402
import msgspec  # noqa: E402
import uvloop  # noqa: E402

from radixfleet.models import resolve  # noqa: E402
from services.tokenizer import http_server  # noqa: E402
from shared.messages.request import SamplingParams  # noqa: E402
from tests.fakes import FakeWorker  # noqa: E402
from tests.local_peers import worker_hello  # noqa: E402

VOCAB = 49_152
EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1795984651,'
    b'"model":"small","choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null,'
    b'"matched_stop":null}]}\n\n'
)
CONTEXT = 200_000  # tokens: a prompt of 1 MB is just too long
TICKS = os.sysconf("SC_CLK_TCK")


def any_word(state: int, mask: bytes | None, sampling: SamplingParams) -> int:
    return 1000 + (state >> 7) % 40_000


async def fake_worker(endpoint: str, step_s: float) -> None:
    """Until it is ended."""
    hello = worker_hello(
        vocab_size=VOCAB, num_pages=60_000, max_slots=512, max_batched_tokens=8192, max_context=CONTEXT + 1000
    )
    worker = FakeWorker(endpoint, hello, step_s, verify=False)
    worker.engine.choose = any_word
    await asyncio.Event().wait()


class BareApp:
    """The ASGI server's ceiling: ?count=N events, one write for each."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": message["type"] + ".complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        count = int(scope["path"].rsplit("/", 1)[1])
        head = [(b"content-type", b"text/event-stream"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        for _ in range(count):
            await send({"type": "http.response.body", "body": EVENT, "more_body": True})
            await asyncio.sleep(0)  # as a server with other streams
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def bare_server() -> None:
    """Prints its URL, serves until it is ended."""
    server = http_server.HttpServer(BareApp(), http_server.listen("127.0.0.1", 0, -1, 60.0), "warning")
    await server.start()
    print(server.url, flush=True)
    await asyncio.Event().wait()


@contextmanager
def process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that ends with the `with`."""
    command = [sys.executable, *arguments]
    started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield started
    finally:
        started.terminate()
        started.wait()
        assert started.stdout is not None
        started.stdout.close()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Door:
    """The processes of one run."""

    def __init__(self, stack: ExitStack, step_s: float) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rf"))
        model = str(resolve(None))
        ends = {name: f"ipc://{folder}/{name}" for name in ("t", "d", "w", "o")}
        binds = ("--tokenizer-bind", ends["t"], "--detokenizer-bind", ends["d"], "--worker-bind", ends["w"])
        listener = http_server.listen("127.0.0.1", 0, -1, 60.0)
        port = listener.getsockname()[1]
        listener.close()
        self.url = f"http://127.0.0.1:{port}"
        start = stack.enter_context
        start(process("-m", "services.scheduler", *binds))
        self.detokenizer = start(
            process("-m", "services.detokenizer", "--model-path", model, "--scheduler", ends["d"], "--bind", ends["o"])
        )
        settings = ("--scheduler", ends["t"], "--port", str(port), "--context-length", str(CONTEXT))
        self.tokenizer = start(process("-m", "services.tokenizer", "--model-path", model, *settings))
        start(process(__file__, "--as-worker", ends["w"], "--step", str(step_s)))

    async def ready(self) -> None:
        async with httpx.AsyncClient(base_url=self.url) as client:
            for _ in range(600):
                try:
                    if (await client.get("/ready")).status_code == 200:
                        return
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.1)
        raise SystemExit("the door does not become ready")

    def spent(self) -> tuple[float, float]:
        return cpu_seconds(self.tokenizer.pid), cpu_seconds(self.detokenizer.pid)


async def read_stream(url: str, method: str, path: str, body: bytes = b"") -> AsyncIterator[bytes]:
    """Raw pieces of an answer on a connection of its own."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1 << 20)
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    while piece := await reader.read(1 << 18):
        yield piece
    writer.close()


def completion(tokens: int, number: int) -> bytes:
    body = {"prompt": f"Story {number}:", "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    return msgspec.json.encode(body)


async def consume(url: str, method: str, path: str, body: bytes = b"") -> int:
    """Events of one stream."""
    count, rest = 0, b""
    async for piece in read_stream(url, method, path, body):
        data = rest + piece
        count += data.count(b"data: ")
        rest = data[-5:] if not data.endswith(b"data: ") else b""
    return count


async def throughput(clients: int, total: int) -> dict[str, float]:
    """Tokens per processor second at the door, and events per processor second of the bare server."""
    each = min(max(total // clients, 20), 4000)
    with ExitStack() as stack:
        door = Door(stack, 0.0)
        await door.ready()
        await consume(door.url, "POST", "/v1/completions", completion(20, -1))
        before, began = door.spent(), time.monotonic()
        await asyncio.gather(
            *(consume(door.url, "POST", "/v1/completions", completion(each, n)) for n in range(clients))
        )
        wall = time.monotonic() - began
        tokenizer, detokenizer = (now - then for now, then in zip(door.spent(), before, strict=True))
    with process(__file__, "--as-bare") as bare:
        assert bare.stdout is not None
        url = bare.stdout.readline().strip()
        start = cpu_seconds(bare.pid)
        await asyncio.gather(*(consume(url, "GET", f"/{each}") for _ in range(clients)))
        ceiling = cpu_seconds(bare.pid) - start
    tokens = each * clients
    return {
        "tokens": tokens,
        "wall": tokens / wall,
        "tokenizer": tokens / max(tokenizer, 1e-2),
        "detokenizer": tokens / max(detokenizer, 1e-2),
        "both": tokens / max(tokenizer + detokenizer, 1e-2),
        "ceiling": tokens / max(ceiling, 1e-2),
    }


async def gaps(door: Door, beside: int) -> list[float]:
    """Milliseconds between the events of one stream of 10 ms steps, while so many 1 MB prompts arrive."""
    times: list[float] = []
    prompts = [f"{n} " + "the quick brown fox jumps over the lazy dog " * (1 << 20) for n in range(beside)]
    bodies = [msgspec.json.encode({"prompt": prompt[: 1 << 20], "max_tokens": 1}) for prompt in prompts]
    sent: asyncio.Future[list[int]] | None = None
    async for piece in read_stream(door.url, "POST", "/v1/completions", completion(400, beside)):
        if b"data: {" in piece:
            times.append(time.monotonic())
        if len(times) == 100 and sent is None and beside:
            sent = asyncio.gather(*(consume(door.url, "POST", "/v1/completions", body) for body in bodies))
    if sent is not None:
        await sent
    return [(later - earlier) * 1000 for earlier, later in itertools.pairwise(times[90:])]


async def run(clients: list[int], total: int) -> None:
    print("| clients | tokens | tokens/s | per core: tokenizer | detokenizer | both | bare ASGI | tokenizer / bare |")
    print("|---|---|---|---|---|---|---|---|")
    for count in clients:
        r = await throughput(count, total)
        cells = [f"{r[name]:,.0f}" for name in ("tokens", "wall", "tokenizer", "detokenizer", "both", "ceiling")]
        print(f"| {count} | {' | '.join(cells)} | {r['tokenizer'] / r['ceiling']:.2f} |", flush=True)
    with ExitStack() as stack:
        door = Door(stack, 0.01)
        await door.ready()
        print("\n| 1 MB prompts beside | median gap ms | p99 | largest |\n|---|---|---|---|")
        p99 = {}
        for beside in (0, 5):
            found = await gaps(door, beside)
            p99[beside] = statistics.quantiles(found, n=100)[98]
            print(f"| {beside} | {statistics.median(found):.1f} | {p99[beside]:.1f} | {max(found):.1f} |", flush=True)
        print(f"\np99 beside them over p99 alone: {p99[5] / p99[0]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--clients", default="1,64,512")
    parser.add_argument("--as-worker", help=argparse.SUPPRESS)
    parser.add_argument("--step", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--as-bare", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_worker:
        uvloop.run(fake_worker(options.as_worker, options.step))
    elif options.as_bare:
        uvloop.run(bare_server())
    else:
        uvloop.run(run([int(n) for n in options.clients.split(",")], options.tokens))


if __name__ == "__main__":
    main()
