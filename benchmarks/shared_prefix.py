"""Ten-round conversations with and without the radix cache: the seed article's columns as ratios from one run.

    python benchmarks/shared_prefix.py [--conversations 8] [--rounds 10] [--dtype bfloat16]

Starts the server twice on this machine, with `--disable-radix-cache` and without it, runs the same
conversations through /generate (streamed; the whole history is sent again each round, as chat clients do),
and compares. `ideal` is what a naive trie over the ids actually sent and generated would have hit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from radixfleet.local_server import LocalServer

SYSTEM = "You are a patient guide who answers in plain words and never leaves a question open. " * 4
WORDS = (
    "river stone light paper garden window winter market letter bridge music island copper forest signal "
    "harbor mirror silver engine valley candle mountain planet thunder carpet ladder orange pencil rocket"
).split()


class Trie:
    """The naive truth: every sequence ever seen, one dict per token."""

    def __init__(self) -> None:
        self.root: dict[int, Any] = {}

    def longest_prefix(self, ids: list[int]) -> int:
        node = self.root
        for depth, token in enumerate(ids):
            if token not in node:
                return depth
            node = node[token]
        return len(ids)

    def insert(self, ids: list[int]) -> None:
        node = self.root
        for token in ids:
            node = node.setdefault(token, {})


@dataclass
class Run:
    """What one server did with the workload."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ideal_tokens: int = 0
    ttft: list[float] = field(default_factory=list)
    conversation_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    trie: Trie = field(default_factory=Trie)

    @property
    def computed_per_request(self) -> float:
        return (self.prompt_tokens - self.cached_tokens) / self.requests


async def one_round(client: httpx.AsyncClient, run: Run, text: str, output_tokens: int) -> str:
    """Send the history, take the answer; returns the answer's text."""
    body = {
        "text": text,
        "stream": True,
        "return_prompt_token_ids": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True},
    }
    started = time.perf_counter()
    first = 0.0
    last: dict[str, Any] = {}
    async with client.stream("POST", "/generate", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                last = json.loads(line[6:])
                if not first and last["output_ids"]:
                    first = time.perf_counter() - started
    meta = last["meta_info"]
    prompt_ids = last.get("prompt_token_ids") or meta["prompt_token_ids"]
    run.requests += 1
    run.prompt_tokens += meta["prompt_tokens"]
    run.cached_tokens += meta["cached_tokens"]
    run.ideal_tokens += run.trie.longest_prefix(prompt_ids)
    run.trie.insert(prompt_ids + last["output_ids"])
    run.ttft.append(first)
    return str(last["text"])


async def conversation(client: httpx.AsyncClient, run: Run, seed: int, rounds: int, output_tokens: int) -> None:
    rng = random.Random(seed)
    text = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
    started = time.perf_counter()
    for _ in range(rounds):
        question = " ".join(rng.choice(WORDS) for _ in range(50))
        text += f"<|im_start|>user\n{question}?<|im_end|>\n<|im_start|>assistant\n"
        text += await one_round(client, run, text, output_tokens) + "<|im_end|>\n"
    run.conversation_s.append(time.perf_counter() - started)


async def workload(url: str, options: argparse.Namespace) -> Run:
    run = Run()
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        # one conversation alone first: what follows shares its system prompt, as a warm service would
        started = time.perf_counter()
        await conversation(client, run, 0, options.rounds, options.output_tokens)
        await asyncio.gather(
            *(
                conversation(client, run, seed, options.rounds, options.output_tokens)
                for seed in range(1, options.conversations)
            )
        )
        run.wall_s = time.perf_counter() - started
    return run


def measure(options: argparse.Namespace, *flags: str) -> Run:
    common = ["--dtype", options.dtype, "--log-level", "warning", *flags]
    if options.model:
        common += ["--model-path", options.model]
    with LocalServer(*common) as server:
        return asyncio.run(workload(server.url, options))


def report(without: Run, cached: Run) -> None:
    rows: list[tuple[str, float, float, float]] = [
        ("hit rate %", *(100 * r.cached_tokens / r.prompt_tokens for r in (without, cached)), float("nan")),
        (
            "computed tokens / request",
            without.computed_per_request,
            cached.computed_per_request,
            without.computed_per_request / cached.computed_per_request,
        ),
    ]
    rates = [r.requests / r.wall_s for r in (without, cached)]
    rows.append(("requests / s", rates[0], rates[1], rates[1] / rates[0]))
    alone = [r.conversation_s[0] for r in (without, cached)]
    rows.append(("10-round conversation, alone, s", alone[0], alone[1], alone[0] / alone[1]))
    busy = [statistics.mean(r.conversation_s[1:] or r.conversation_s) for r in (without, cached)]
    rows.append(("10-round conversation, together, s", busy[0], busy[1], busy[0] / busy[1]))
    for name, pick in (("TTFT p50, ms", 50), ("TTFT p99, ms", 99)):
        values = [1000 * statistics.quantiles(r.ttft, n=100)[pick - 1] for r in (without, cached)]
        rows.append((name, values[0], values[1], values[0] / values[1]))
    print(f"{'':36}{'no cache':>12}{'radix cache':>14}{'ratio':>9}")
    for name, a, b, ratio in rows:
        print(f"{name:36}{a:12.2f}{b:14.2f}{'' if ratio != ratio else f'{ratio:8.2f}x':>9}")
    share = cached.cached_tokens / cached.ideal_tokens
    print(f"\nhits {cached.cached_tokens} of ideal {cached.ideal_tokens} tokens: {100 * share:.2f} % of a naive trie")
    print(f"ideal hit rate {100 * cached.ideal_tokens / cached.prompt_tokens:.2f} %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output-tokens", type=int, default=50)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--model", default="")
    options = parser.parse_args()
    without = measure(options, "--disable-radix-cache")
    cached = measure(options)
    report(without, cached)


if __name__ == "__main__":
    main()
