"""Person JSON three ways on one server: free text with retries, constrained token by token, constrained with jumps.

    python benchmarks/structured.py [--requests 60] [--concurrency 64] [flags of `radixfleet serve`]

Prints, alone and together: latencies (mean, P50, P95, jitter = P95 - P50), how often a first try succeeds, decode steps
saved, mask times (per token, and a worker's wait), and the time of unconstrained output of as many tokens. Leaves
judging the numbers to the reader.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

import httpx

from benchmarks.scrape import Scrape, scrape
from radixfleet.local_server import LocalServer

TRIES = 5
MAX_TOKENS = 96
TEMPERATURE = 0.9  # a first try of the small model succeeds in about two of five cases
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
        sampling = {"temperature": TEMPERATURE, "max_new_tokens": MAX_TOKENS, "sampling_seed": seed, **params}
        answer = await self.http.post("/generate", json={"text": text, "sampling_params": sampling})
        answer.raise_for_status()
        result: dict[str, Any] = answer.json()
        return result


def is_person(text: str) -> bool:
    """A strict parse: one object, the schema's keys, types and ranges, nothing around it."""
    try:
        person = json.loads(text)
    except ValueError:
        return False
    rules: dict[str, Any] = SCHEMA["properties"]  # type: ignore[assignment]
    if not isinstance(person, dict) or set(person) != set(rules):
        return False
    return all(_fits(person[key], rule) for key, rule in rules.items())


def _fits(value: Any, rule: dict[str, Any]) -> bool:
    if rule["type"] == "string":
        return isinstance(value, str) and len(value) <= rule["maxLength"]
    if rule["type"] == "integer":
        return type(value) is int and rule["minimum"] <= value <= rule["maximum"]
    return isinstance(value, bool)


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


class Result:
    """Latencies in seconds, and what the server counted meanwhile."""

    def __init__(self, seconds: list[float], tally: Tally, before: Scrape, after: Scrape) -> None:
        cuts = statistics.quantiles(seconds, n=20)
        self.tally = tally
        self.values = {"mean": statistics.fmean(seconds), "p50": cuts[9], "p95": cuts[18], "jitter": cuts[18] - cuts[9]}
        self.steps = after.value("radixfleet_scheduler_steps_total") - before.value("radixfleet_scheduler_steps_total")
        self.row = after.histogram("radixfleet_mask_row_seconds").since(before.histogram("radixfleet_mask_row_seconds"))
        self.wait = after.histogram("radixfleet_mask_wait_seconds").since(
            before.histogram("radixfleet_mask_wait_seconds")
        )

    def show(self, name: str) -> None:
        shown = "  ".join(f"{key} {1e3 * value:8.1f} ms" for key, value in self.values.items())
        print(f"{name:40s} {shown}  steps {self.steps:6.0f}  failed {self.tally.failed}", flush=True)

    def show_masks(self) -> None:
        for name, times in (("mask of one token", self.row), ("a worker's wait for masks", self.wait)):
            p50, p99 = (f"{1e3 * times.quantile(q):g} ms" for q in (0.5, 0.99))
            print(f"    {name:34s} p50 <= {p50}, p99 <= {p99}, mean {1e3 * times.mean:.3f} ms")

    def against(self, other: Result, key: str) -> str:
        return f"{100 * (self.values[key] / other.values[key] - 1):+.0f} %"


async def measure(name: str, count: int, concurrency: int, client: Client, work: Any, *more: Any) -> Result:
    gate, tally, seconds = asyncio.Semaphore(concurrency), Tally(), []

    async def one(index: int) -> None:
        async with gate:
            started = time.perf_counter()
            await work(client, index, tally, *more)
            seconds.append(time.perf_counter() - started)

    before = await scrape(client.http)
    await asyncio.gather(*map(one, range(count)))
    result = Result(seconds, tally, before, await scrape(client.http))
    result.show(name)
    return result


async def compare(client: Client, total: int, width: int) -> None:
    print(f"\n{total} requests, {width} at a time")
    free = await measure("(a) free text, strict parse, retry", total, width, client, free_text)
    slow = await measure("(b) constrained", total, width, client, constrained, False)
    slow.show_masks()
    fast = await measure("(c) constrained, forced tokens", total, width, client, constrained, True)
    fast.show_masks()
    lengths = fast.tally.tokens
    plain = await measure("    unconstrained, as many tokens as (c)", total, width, client, same_length, lengths)
    print(f"first try of (a) succeeds: {100 * free.tally.first_tries / total:.0f} %")
    for key in ("mean", "jitter"):
        print(f"(c) against (a), {key}: {fast.against(free, key)};  (b) against (a): {slow.against(free, key)}")
    print(f"(c) against unconstrained of as many tokens, mean: {fast.against(plain, 'mean')}")
    print(f"tokens of (c): {statistics.fmean(lengths):.1f}; ", end="")
    print(f"steps saved by forced tokens: {100 * (1 - fast.steps / slow.steps):.0f} %")


async def run(url: str, count: int, concurrency: int) -> None:
    client = Client(url)
    await measure("warm-up", 3, 1, client, constrained, True)
    await measure("warm-up", 3, 1, client, free_text)
    await compare(client, count, 1)
    await compare(client, max(count, concurrency), concurrency)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--concurrency", type=int, default=64)
    options, flags = parser.parse_known_args()
    with LocalServer("--log-level", "warning", *flags) as server:
        asyncio.run(run(server.url, options.requests, options.concurrency))


if __name__ == "__main__":
    main()
