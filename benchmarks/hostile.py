"""Hostile constraints beside a plain greedy stream: what each is answered, and what its neighbour felt of it.

    python benchmarks/hostile.py [--tokens 200] [flags of `radixfleet serve`]

The neighbour streams again and again; its largest gap between two tokens is printed for every input, next to that of
runs without any, and the processor time of the scheduler's loop. Leaves judging to the reader and to the tests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import httpx

from benchmarks.hostile_inputs import HOSTILE
from benchmarks.scrape import scrape
from radixfleet.local_server import LocalServer

PROMPT = "Once upon a time, in a village by the sea,"
CALM_RUNS = 5
LOOP = "radixfleet_scheduler_loop_cpu_seconds"
TURN_LIMIT_S = 0.005


class Neighbour:
    """One greedy stream after the other. `gaps`: seconds between two events of the running one."""

    def __init__(self, http: httpx.AsyncClient, tokens: int) -> None:
        self._http = http
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
        self._body = {"text": PROMPT, "stream": True, "sampling_params": params}
        self.worst = 0.0
        self.texts: set[str] = set()

    async def run(self) -> None:
        """One whole stream."""
        text, before = "", 0.0
        async with self._http.stream("POST", "/generate", json=self._body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    text, now = json.loads(line[6:])["text"], time.perf_counter()
                    self.worst = max(self.worst, now - before) if before else self.worst
                    before = now
        self.texts.add(text)

    async def keep_on(self) -> None:
        while True:
            await self.run()

    def take_worst(self) -> float:
        worst, self.worst = self.worst, 0.0
        return worst


async def send(http: httpx.AsyncClient, params: dict[str, Any]) -> tuple[int, str]:
    """Status and the reason or the answer."""
    body = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 16, **params}}
    answer = await http.post("/generate", json=body)
    told = answer.json()
    return answer.status_code, told["text"] if answer.status_code == 200 else told["error"]["message"]


async def run(url: str, tokens: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=600) as http:
        calm = Neighbour(http, tokens)
        for _ in range(CALM_RUNS):
            await calm.run()
        normal = calm.take_worst()
        print(f"the neighbour alone: largest gap {1e3 * normal:.1f} ms in {CALM_RUNS} streams of {tokens} tokens")
        before = (await scrape(http)).histogram(LOOP)
        neighbour = Neighbour(http, tokens)
        running = asyncio.create_task(neighbour.keep_on())
        worst = 0.0
        for name, params in HOSTILE:
            started = time.perf_counter()
            status, told = await send(http, params)
            seconds, gap = time.perf_counter() - started, neighbour.take_worst()
            worst = max(worst, gap)
            print(f"{name:34s} {status} {seconds:5.2f} s  gap {1e3 * gap:6.1f} ms  {told[:70]!r}", flush=True)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        turns = (await scrape(http)).histogram(LOOP).since(before)
        unchanged = neighbour.texts <= calm.texts
        print(f"largest gap {1e3 * worst:.1f} ms, {worst / normal:.2f} times normal; text unchanged: {unchanged}")
        print(f"turns {turns.count:.0f}, over 5 ms of processor time: {turns.above(TURN_LIMIT_S):.0f}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=200)
    options, flags = parser.parse_known_args()
    with LocalServer("--log-level", "warning", "--dtype", "float32", *flags) as server:
        asyncio.run(run(server.url, options.tokens))


if __name__ == "__main__":
    main()
