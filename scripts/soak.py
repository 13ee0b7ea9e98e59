"""Load for minutes while services are killed and frozen at random: every answer must be the undisturbed one.

    python scripts/soak.py [--minutes 5] [--seed 1] [--streams 16] [--workers 2] [--write docs/soak.md]

Answers are compared in fp32, greedy and seeded, streamed and not, with stop strings, n = 2 and clients that leave.
Ends with 1 if an answer differed, a page was lost, or something was left behind. The seed repeats a run's choices.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import os
import platform
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from radixfleet.local_server import LocalServer  # noqa: E402
from tests.system.processes import descendants  # noqa: E402
from tests.system.prompts import thirty  # noqa: E402

SERVICES = ("gpu_worker", "detokenizer", "scheduler")
RETRY_STATUS = (503, 429)
MOST_HITS, SPARED_S = 3, 75.0
"""The launcher gives up where one service ends five times within a minute, which is what it should do."""


@dataclass
class Tally:
    answers: int = 0
    left: int = 0  # clients that went away
    refused: int = 0  # 503 or 429 while something was down: sent again
    kills: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)


def bodies(rng: random.Random) -> list[dict[str, Any]]:
    """The requests of the trial, each with one right answer."""
    made = []
    for i, text in enumerate(thirty()[:-1]):
        sampling: dict[str, Any] = {"max_new_tokens": rng.randint(8, 40), "ignore_eos": i % 3 == 0}
        sampling |= {"temperature": 0} if i % 2 == 0 else {"temperature": 0.8, "top_k": 40, "seed": 100 + i}
        if i % 5 == 0:
            sampling["stop"] = ["the", "。", "\n\n"]
        if i % 7 == 0:
            sampling |= {"n": 2, "seed": 100 + i}
        if i % 11 == 0:
            sampling |= {"frequency_penalty": 0.5, "presence_penalty": 0.2}
        made.append({"text": text, "sampling_params": sampling})
    return made


def outcome(answer: Any) -> Any:
    answers = answer if isinstance(answer, list) else [answer]
    return [(a["text"], a["output_ids"], a["meta_info"]["finish_reason"]) for a in answers]


async def ask(client: httpx.AsyncClient, body: dict[str, Any], tally: Tally) -> Any:
    """The answer, asked for again while the door says that something is missing."""
    while True:
        response = await client.post("/generate", json=body)
        if response.status_code not in RETRY_STATUS:
            response.raise_for_status()
            return response.json()
        tally.refused += 1
        await asyncio.sleep(float(response.headers.get("retry-after", 1)))


async def leave(client: httpx.AsyncClient, body: dict[str, Any], rng: random.Random, tally: Tally) -> None:
    """Read a few events of a stream and go away."""
    async with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        events = rng.randint(0, 6)
        async for _ in response.aiter_lines():
            events -= 1
            if events < 0:
                break
    tally.left += 1


async def customer(
    client: httpx.AsyncClient, cases: list[tuple[dict[str, Any], Any]], rng: random.Random, tally: Tally, end: float
) -> None:
    while time.monotonic() < end:
        body, expected = rng.choice(cases)
        try:
            if rng.random() < 0.15:
                await leave(client, body, rng, tally)
                continue
            got = outcome(await ask(client, body, tally))
        except httpx.HTTPError as error:
            tally.wrong.append(f"{body['text'][:40]!r}: {error!r}")
            continue
        tally.answers += 1
        if got != expected:
            tally.wrong.append(f"{body['text'][:40]!r}: got {got} expected {expected}")


async def reaper(server: LocalServer, rng: random.Random, tally: Tally, end: float) -> None:
    hits: list[tuple[float, str]] = []
    while (left := end - time.monotonic()) > 20:
        await asyncio.sleep(min(rng.uniform(8, 20), left))
        late = [name for when, name in hits if when > time.monotonic() - SPARED_S]
        name = rng.choice([name for name in SERVICES if late.count(name) < MOST_HITS])
        hits.append((time.monotonic(), name))
        victims = [p for p, c in descendants(server.process.pid).items() if f"services.{name}" in c]
        victims = [p for p in victims if "constraint" not in descendants(server.process.pid).get(p, "")]
        if not victims:
            continue
        freeze = rng.random() < 0.25
        os.kill(rng.choice(victims), signal.SIGSTOP if freeze else signal.SIGKILL)
        tally.kills[f"{'SIGSTOP' if freeze else 'SIGKILL'} {name}"] += 1


async def settled(client: httpx.AsyncClient, problems: list[str]) -> None:
    """Nothing runs any more, and after a flush every page is free."""
    for _ in range(60):
        flushed = await client.get("/flush_cache")
        workers = (await client.get("/workers")).json()
        if flushed.status_code == 200 and workers and all(w["pages_free"] == w["num_pages"] for w in workers):
            return
        await asyncio.sleep(0.5)
    problems.append(f"pages did not come home: {workers}")


async def trial(server: LocalServer, options: argparse.Namespace) -> tuple[Tally, list[str]]:
    rng = random.Random(options.seed)
    tally, problems = Tally(), list[str]()
    async with httpx.AsyncClient(base_url=server.url, timeout=180) as client:
        cases = [(body, outcome(await ask(client, body, tally))) for body in bodies(rng)]
        end = time.monotonic() + 60 * options.minutes
        seeds = [rng.getrandbits(32) for _ in range(options.streams)]
        await asyncio.gather(
            reaper(server, random.Random(rng.getrandbits(32)), tally, end),
            *(customer(client, cases, random.Random(seed), tally, end) for seed in seeds),
        )
        await settled(client, problems)
    return tally, problems


def report(options: argparse.Namespace, tally: Tally, problems: list[str]) -> str:
    lines = [
        "# Last soak run\n",
        f"`python scripts/soak.py --minutes {options.minutes} --seed {options.seed} --streams {options.streams}"
        f" --workers {options.workers}` on {time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores\n",
        "| | |\n|---|---|",
        f"| answers compared | {tally.answers} |",
        f"| clients that left in mid-stream | {tally.left} |",
        f"| asked again after 503 or 429 | {tally.refused} |",
        *(f"| {kind} | {count} |" for kind, count in sorted(tally.kills.items())),
        f"| answers that differed or failed | {len(tally.wrong)} |",
        f"| other problems | {len(problems)} |",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    flags = ["--dtype", "float32", "--max-total-tokens", "2048", "--workers", str(options.workers)]
    server = LocalServer(*flags, "--log-level", "warning", "--frozen-timeout", "6")
    with server:
        tally, problems = asyncio.run(trial(server, options))
        children = descendants(server.process.pid)
        if server.stop() != 0:
            problems.append("the server did not end with 0")
    problems += [f"left behind: {command}" for pid, command in children.items() if Path(f"/proc/{pid}").exists()]
    text = report(options, tally, problems)
    print(text)
    for line in (*tally.wrong, *problems):
        print(line)
    if options.write:
        options.write.write_text(text)
    return 1 if tally.wrong or problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
