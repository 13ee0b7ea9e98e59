"""The same server with and without guesses of the next tokens (--speculative-algorithm): speed, steps and answers.

    python benchmarks/guesses.py [--workloads w1,w2,w3] [--repeats 2] [--scale 1.0] [--model PATH] [--dtype bfloat16]

Starts a server with guesses and one without, one after the other, and runs the load client's workloads on each. Prints
for each workload the ratio of what it takes, above 1 where guesses help, and how many guesses were sent and came true.
How much there is to guess is the text's doing: the client's prompts are random words, on which a small model often
repeats itself. Fails where one answer differs.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx

from benchmarks import load
from benchmarks.scrape import PICTURE_AGE_S, Scrape, scrape
from radixfleet.local_server import LocalServer
from radixfleet.models import resolve

COUNTS = ("scheduler_draft_tokens", "scheduler_accepted_draft_tokens", "scheduler_steps", "generation_tokens")
PROMPTS = ("The capital of France is", "Once upon a time there was", "Count: one, two, one, two, one, two,")


def look(url: str) -> Scrape:
    async def settled() -> Scrape:
        await asyncio.sleep(PICTURE_AGE_S)
        async with httpx.AsyncClient(base_url=url) as http:
            return await scrape(http)

    return asyncio.run(settled())


def measure(model: Path, options: argparse.Namespace, algorithm: str) -> tuple[dict[str, list[float]], list[str]]:
    """Seconds of each workload, a number for each repeat, and answers; prints what was counted."""
    flags = ("--speculative-algorithm", algorithm, "--dtype", options.dtype, "--log-level", "warning")
    with LocalServer("--model-path", str(model), *flags) as server:
        params = {"temperature": 0, "max_new_tokens": 100, "ignore_eos": True}
        body = {"text": [*PROMPTS, *PROMPTS], "sampling_params": params}
        answers = httpx.post(f"{server.url}/generate", json=body, timeout=600).raise_for_status().json()
        found: dict[str, list[float]] = {}
        for workload in options.workloads:
            before = look(server.url)
            arguments: Any = (server.url, "default", model, "radixfleet")
            rest: Any = {"workloads": [workload], "repeats": options.repeats, "scale": options.scale}
            for line in asyncio.run(load.run(*arguments, **rest)):
                if line["errors"]:
                    raise SystemExit(f"{line['workload']}: {line['first_error']}")
                found.setdefault(line["workload"], []).append(line["wall_s"])
            after = look(server.url)
            sent, right, steps, tokens = (_since(name, before, after) for name in COUNTS)
            share = f"{right / sent:.0%} of {sent:.0f} guesses true, " if sent else "no guesses, "
            print(f"{algorithm:6} {workload}: {share}{tokens / steps:.2f} tokens a step", flush=True)
    return found, [answer["text"] for answer in answers]


def _since(name: str, before: Scrape, after: Scrape) -> float:
    series = f"radixfleet_{name}_total"
    return after.value(series) - before.value(series)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=lambda s: s.split(","), default=["w1", "w2", "w3"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    model = Path(resolve(options.model))
    with_guesses, answers = measure(model, options, "ngram")
    without, plain = measure(model, options, "none")
    if answers != plain:
        raise SystemExit(f"guesses change an answer:\n{answers}\n{plain}")
    for workload, seconds in with_guesses.items():
        ours, other = statistics.median(seconds), statistics.median(without[workload])
        print(f"{workload:8} with guesses {ours:7.2f} s, without {other:7.2f} s: {other / ours:.2f}x")


if __name__ == "__main__":
    main()
