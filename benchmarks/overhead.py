"""Where a step's time goes: worker compute, the worker's idle time between steps, and the CPU of every process.

    python benchmarks/overhead.py [--streams 8] [--tokens 512] [--model PATH] [--dtype bfloat16] [--flags "..."]

Starts a server, lets `streams` clients decode at once, and reads between two points of steady decoding what the
processes have used (/proc) and what the worker says of itself (/metrics). `idle`: the worker had nothing to compute
though all streams wanted tokens. The client of this benchmark runs on the same cores, and is listed as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import aiohttp

from radixfleet.local_server import LocalServer

TICK = os.sysconf("SC_CLK_TCK")
NEWS_S = 30.0  # a worker that computes says so more often; one that does not is named otherwise in /metrics
WARM_TOKENS = 32  # of every stream before the first reading; the last one, which waits for news, begins half-way
SERVICES = ("tokenizer", "scheduler", "gpu_worker", "detokenizer")


@dataclass(frozen=True)
class Reading:
    """One moment: seconds of CPU by process, and the worker's own counters."""

    at: float
    cpu: dict[str, float]
    steps: float
    busy_s: float
    tokens: int


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def processes(parent: int) -> dict[str, int]:
    """The services below a launcher, by name."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes().decode(errors="replace")
                above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            name = re.search(r"services\.(\w+)\0", command)
            if above == parent and name and name[1] in SERVICES:
                found[name[1]] = int(folder.name)
    return found


def worker_gauge(url: str, name: str) -> float:
    """0 before the worker's first heartbeat with steps."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    match = re.search(rf'^radixfleet_service_{name}{{[^}}]*service="worker"[^}}]*}} (\S+)$', text, re.MULTILINE)
    return float(match[1]) if match else 0.0


class Streams:
    """Clients that decode at once; counts their tokens as they come."""

    def __init__(self, url: str, number: int, tokens: int) -> None:
        self._url, self._number, self._tokens = url, number, tokens
        self.counts = [0] * number
        self._moved = asyncio.Event()

    async def run(self) -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(self._one(session, index) for index in range(self._number)))

    async def all_at(self, tokens: int) -> None:
        """Every stream has that many tokens."""
        while min(self.counts) < tokens:
            self._moved.clear()
            await self._moved.wait()

    async def _one(self, session: aiohttp.ClientSession, index: int) -> None:
        parameters = {"temperature": 0, "max_new_tokens": self._tokens, "ignore_eos": True}
        body = {"text": f"{index} is a number that", "stream": True, "sampling_params": parameters}
        async with session.post(f"{self._url}/generate", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    self.counts[index] = json.loads(line[6:])["meta_info"]["completion_tokens"]
                    self._moved.set()


async def read(url: str, pids: dict[str, int], streams: Streams) -> Reading:
    """The worker's numbers come with its heartbeats: waits until one of them is new. Raises TimeoutError."""
    steps = await asyncio.to_thread(worker_gauge, url, "steps")
    async with asyncio.timeout(NEWS_S):
        while (now := await asyncio.to_thread(worker_gauge, url, "steps")) == steps:
            await asyncio.sleep(0.05)
    cpu = {name: cpu_seconds(pid) for name, pid in pids.items()}
    cpu["client"] = cpu_seconds(os.getpid())
    busy = await asyncio.to_thread(worker_gauge, url, "busy_seconds")
    return Reading(time.perf_counter(), cpu, now, busy, sum(streams.counts))


async def measure(server: LocalServer, options: argparse.Namespace) -> tuple[Reading, Reading]:
    pids = processes(server.process.pid)
    streams = Streams(server.url, options.streams, options.tokens)
    work = asyncio.create_task(streams.run())
    await streams.all_at(WARM_TOKENS)
    first = await read(server.url, pids, streams)
    await streams.all_at(max(options.tokens // 2, WARM_TOKENS))
    last = await read(server.url, pids, streams)
    await work
    return first, last


def report(first: Reading, last: Reading, streams: int) -> None:
    wall, steps = last.at - first.at, last.steps - first.steps
    tokens, busy = last.tokens - first.tokens, last.busy_s - first.busy_s
    print(f"{streams} streams, {steps:.0f} steps, {tokens} tokens, {tokens / wall:.1f} tokens/s")
    print(f"{'':24}{'ms per step':>12}{'us per token':>14}{'share':>8}")

    def line(name: str, seconds: float, of: float) -> None:
        print(f"{name:24}{1e3 * seconds / steps:12.3f}{1e6 * seconds / tokens:14.1f}{seconds / of:8.1%}")

    line("wall", wall, wall)
    line("worker computes", busy, wall)
    line("worker idle", max(wall - busy, 0), wall)
    cores = wall * (os.cpu_count() or 1)
    for name in last.cpu:
        line(f"CPU of {name}", last.cpu[name] - first.cpu[name], cores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--flags", type=shlex.split, default=[], help="more flags of `radixfleet serve`")
    options = parser.parse_args()
    flags = ["--dtype", options.dtype, "--log-level", "warning", "--stream-output", *options.flags]
    if options.model:
        flags += ["--model-path", options.model]
    with LocalServer(*flags) as server:
        report(*asyncio.run(measure(server, options)), options.streams)


if __name__ == "__main__":
    main()
