"""Person JSON three ways on one server: free text with retries, constrained token by token, constrained with jumps.

    python benchmarks/structured.py [--requests 40] [--concurrency 64] [flags of `radixfleet serve`]

Prints latencies (mean, P50, P95, jitter = P95 - P50), steps saved, mask times, and the time of unconstrained output of
the same length. Leaves judging the numbers to the reader.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import time
from typing import Any

import httpx

from radixfleet.local_server import LocalServer

TRIES = 5
MAX_TOKENS = 96
SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 20},
        "last_name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "email_address": {"type": "string", "maxLength": 40},
        "is_employed": {"type": "boolean"},
    },
    "required": ["first_name", "last_name", "age", "email_address", "is_employed"],
    "additionalProperties": False,
}
EXAMPLE = '{"first_name":"Ada","last_name":"Lovelace","age":36,"email_address":"ada@example.org","is_employed":true}'
PROMPT = (
    "Answer with one JSON object with exactly these keys: first_name, last_name, age, email_address, is_employed.\n"
    f"Person: Ada Lovelace\n{EXAMPLE}\nPerson: {{name}}\n"
)
NAMES = ["Grace Hopper", "Alan Turing", "Emmy Noether", "Niels Bohr", "Marie Curie", "Kurt Gödel", "Mary Shelley"]


class Client:
    """Requests against one server; each answer is timed by the caller."""

    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=256))

    async def generate(self, index: int, seed: int, **params: Any) -> dict[str, Any]:
        text = PROMPT.replace("{name}", f"{NAMES[index % len(NAMES)]} {index // len(NAMES) or ''}".strip())
        sampling = {"temperature": 0.7, "max_new_tokens": MAX_TOKENS, "sampling_seed": seed, **params}
        answer = await self.http.post("/generate", json={"text": text, "sampling_params": sampling})
        answer.raise_for_status()
        result: dict[str, Any] = answer.json()
        return result

    async def counter(self, pattern: str) -> float:
        """The sum of all series whose name matches."""
        text = (await self.http.get("/metrics")).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if re.match(pattern, line))


def is_person(text: str) -> bool:
    """A strict parse: one object, the schema's keys and types, nothing around it."""
    try:
        person = json.loads(text)
    except ValueError:
        return False
    types = {"string": str, "integer": int, "boolean": bool}
    wanted = SCHEMA["properties"]
    return (
        isinstance(person, dict)
        and set(person) == set(wanted)  # type: ignore[call-overload]
        and all(type(person[key]) is types[rule["type"]] for key, rule in wanted.items())  # type: ignore[attr-defined]
    )


class Tally:
    def __init__(self) -> None:
        self.first_tries = 0
        self.failed = 0
        self.tokens: list[int] = []


async def free_text(client: Client, index: int, tally: Tally) -> None:
    for attempt in range(TRIES):
        answer = await client.generate(index, seed=index * TRIES + attempt, stop=["\n"])
        if is_person(answer["text"]):
            tally.first_tries += attempt == 0
            return
    tally.failed += 1


async def constrained(client: Client, index: int, tally: Tally, jump: bool) -> None:
    answer = await client.generate(index, seed=index, json_schema=SCHEMA, jump_forward=jump)
    tally.tokens.append(answer["meta_info"]["completion_tokens"])
    tally.failed += not is_person(answer["text"])


async def same_length(client: Client, index: int, tally: Tally, lengths: list[int]) -> None:
    await client.generate(index, seed=index, max_new_tokens=lengths[index % len(lengths)], ignore_eos=True)


async def measure(name: str, count: int, concurrency: int, client: Client, work: Any, *more: Any) -> tuple[Any, Tally]:
    gate, tally, seconds = asyncio.Semaphore(concurrency), Tally(), []

    async def one(index: int) -> None:
        async with gate:
            started = time.perf_counter()
            await work(client, index, tally, *more)
            seconds.append(time.perf_counter() - started)

    steps = r"radixfleet_scheduler_steps_total\{"
    before = await client.counter(steps)
    await asyncio.gather(*map(one, range(count)))
    used = await client.counter(steps) - before
    cuts = statistics.quantiles(seconds, n=20)
    result = {"mean": statistics.fmean(seconds), "p50": cuts[9], "p95": cuts[18], "jitter": cuts[18] - cuts[9]}
    shown = "  ".join(f"{key} {1e3 * value:8.1f} ms" for key, value in result.items())
    print(f"{name:44s} {shown}  steps {used:6.0f}  failed {tally.failed}", flush=True)
    return {**result, "steps": used}, tally


async def run(url: str, count: int, concurrency: int) -> None:
    client = Client(url)
    await measure("warm-up", 3, 1, client, constrained, True)
    await measure("warm-up", 3, 1, client, free_text)
    for width in (1, concurrency):
        total = count if width == 1 else max(count, width)
        print(f"\n{total} requests, {width} at a time")
        free, tried = await measure("(a) free text, strict parse, retry", total, width, client, free_text)
        slow, _ = await measure("(b) constrained", total, width, client, constrained, False)
        fast, kept = await measure("(c) constrained, forced tokens", total, width, client, constrained, True)
        plain, _ = await measure(
            "    unconstrained, as many tokens as (c)", total, width, client, same_length, kept.tokens
        )
        print(f"first try of (a) succeeds: {100 * tried.first_tries / total:.0f} %")
        for key in ("mean", "jitter"):
            print(f"(c) against (a), {key}: {100 * (fast[key] / free[key] - 1):+.0f} %")
        print(f"(c) against unconstrained, mean: {100 * (fast['mean'] / plain['mean'] - 1):+.0f} %")
        print(f"tokens of (c): {statistics.fmean(kept.tokens):.1f}; steps saved by forced tokens: ", end="")
        print(f"{100 * (1 - fast['steps'] / slow['steps']):.0f} %")
    text = (await client.http.get("/metrics")).text
    print("\n" + "\n".join(line for line in text.splitlines() if "mask" in line and not line.startswith("#")))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--concurrency", type=int, default=64)
    options, flags = parser.parse_known_args()
    with LocalServer("--log-level", "warning", *flags) as server:
        asyncio.run(run(server.url, options.requests, options.concurrency))


if __name__ == "__main__":
    main()
