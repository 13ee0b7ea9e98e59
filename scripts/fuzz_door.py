"""Malformed requests by the thousand against real processes, beside a greedy neighbour that must notice nothing.

    python scripts/fuzz_door.py [--count 10000] [--seed 1]

Ends with the number of things that went wrong: server errors, answers that never came, a changed neighbour,
requests or pages that stayed behind.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from radixfleet.local_server import LocalServer  # noqa: E402
from tests.door_fuzz import Tally, storm  # noqa: E402

FLAGS = ("--log-level", "error", "--dtype", "float32", "--max-total-tokens", "4096", "--context-length", "128")
BOUNDS = ("--max-batch-size", "8", "--max-body-bytes", "1048576")
TALE = {
    "text": "Once upon a time, in a village by the sea,",
    "sampling_params": {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True},
}
SETTLE_S = 20.0
PATIENCE_S = 300.0  # a real model answers sixteen requests at once


async def tell(client: httpx.AsyncClient) -> str:
    answer = await client.post("/generate", json=TALE)
    answer.raise_for_status()
    return str(answer.json()["text"])


async def neighbour(client: httpx.AsyncClient, stop: asyncio.Event) -> list[str]:
    """The same tale, over and over."""
    tales = []
    while not stop.is_set():
        tales.append(await tell(client))
    return tales


async def left_behind(client: httpx.AsyncClient) -> str:
    """What is not as it was before the storm; empty where all is well."""
    reason = "never looked"
    for _ in range(int(SETTLE_S / 0.5)):
        await asyncio.sleep(0.5)  # the picture of the system is renewed about this often
        [worker] = (await client.get("/workers")).json()
        flushed = await client.post("/flush_cache")
        [after] = (await client.get("/workers")).json()
        reason = f"running {worker['running']}, flush {flushed.status_code}, free {after['pages_free']}"
        if not worker["running"] and flushed.status_code == 200 and after["pages_free"] == after["num_pages"]:
            return ""
    return reason


async def run(url: str, seed: int, count: int) -> tuple[Tally, list[str]]:
    """The storm's tally, and all that is wrong."""
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        expected = await tell(client)
        stop = asyncio.Event()
        beside = asyncio.create_task(neighbour(client, stop))
        tally = await storm(url, seed, count, patience=PATIENCE_S)
        stop.set()
        tales = await beside
        wrong = list(tally.wrong)
        wrong += [f"the neighbour said {tale!r}" for tale in tales if tale != expected]
        if (await client.get("/health")).status_code != 200:
            wrong.append("the server is not healthy")
        reason = await left_behind(client)
        if reason:
            wrong.append(f"something stayed behind: {reason}")
        print(f"{count} attacks beside {len(tales)} tales")
    return tally, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    options: Any = parser.parse_args()
    with LocalServer(*FLAGS, *BOUNDS) as server:
        tally, wrong = asyncio.run(run(server.url, options.seed, options.count))
    print("kinds:", dict(tally.kinds))
    print("statuses (0: closed without one):", dict(sorted(tally.statuses.items())))
    for line in wrong[:20]:
        print("WRONG", line)
    print(f"{len(wrong)} wrong")
    return len(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
