"""What the compiler saves: requests, computed tokens and time of programs, with each optimisation switched off.

    python benchmarks/programs.py [--url URL] [--items 24] [--openai]

Without --url a server with the small model is started. Counts come from the server's /metrics: HTTP requests (with
those that only tokenise), prompts it admitted, their tokens, and how many of these it computed. `--openai` adds the
same logic over the plain openai client.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from typing import Any

import httpx

from radixfleet import (
    Optimizations,
    RuntimeEndpoint,
    flush_cache,
    function,
    gen,
    select,
    set_default_backend,
)
from radixfleet.local_server import LocalServer

RULES = (
    "You answer questions about cities, briefly and politely. You never invent what you do not know, "
    "you name no sources, and you write in complete sentences. Every answer has at most twelve words. "
)
HEADER = f"{'program':<9}{'optimisations':<20}" + "".join(
    f"{name:>9}" for name in ("HTTP", "prompts", "tokens", "computed", "hit rate", "seconds")
)
COUNTERS = (
    "radixfleet_http_requests_total",
    "sglang:num_requests_total",
    "sglang_cache_hit_total",
    "sglang_cache_miss_total",
)


def slow_fact(place: str) -> str:
    """Stands for an API that takes its time."""
    time.sleep(0.3)
    return f"{place} has many bridges"


@function
def qa(s: Any, context: str, question: str) -> None:
    s += RULES
    s += "Context: " + context + "\n"
    s += "Q: " + question + "\nA:" + gen("answer", max_tokens=8, stop="\n")


@function
def judged(s: Any, context: str, question: str) -> None:
    s += RULES + "Context: " + context + "\nQ: " + question + "\nThe topic is "
    s += select("topic", ["traffic", "history", "food", "weather", "people", "money", "sports", "music"])


@function
def tips(s: Any, context: str, question: str) -> None:
    s += RULES + "Context: " + context + "\n" + question + "\n"
    forks = s.fork(3)
    forks += lambda i: f"Tip {i + 1}:" + gen("tip", max_tokens=6)
    forks.join()


@function
def called(s: Any, context: str, question: str) -> None:
    place = gen("place", max_tokens=2)
    s += RULES + f"The place is {place}. Context: " + context + " " + RULES + question
    s += gen("fact", api_url=slow_fact, params={"place": place}) + gen("answer", max_tokens=4)


PROGRAMS = {"qa": qa, "select": judged, "fork": tips, "call": called}


def counts(url: str) -> dict[str, float]:
    """Counters of the server."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        for wanted in COUNTERS:
            if name.startswith(wanted):
                found[wanted] = found.get(wanted, 0.0) + float(value)
    return found


def measure(url: str, name: str, what: str, work: Callable[[], Any]) -> None:
    """One line of the table: work on an empty cache."""
    flush_cache()
    before, started = counts(url), time.monotonic()
    work()
    seconds, after = time.monotonic() - started, counts(url)
    http, prompts, hit, miss = (after.get(key, 0) - before.get(key, 0) for key in COUNTERS)
    http -= 1  # the look at the counters itself
    rate = hit / (hit + miss) if hit + miss else 0.0
    numbers = f"{http:>9.0f}{prompts:>9.0f}{hit + miss:>9.0f}{miss:>9.0f}{rate:>9.1%}{seconds:>9.2f}"
    print(f"{name:<9}{what:<20}{numbers}", flush=True)


def variants() -> dict[str, Optimizations]:
    names = [field.name for field in fields(Optimizations)]
    without = {f"all but {name}": Optimizations(**{name: False}) for name in names}
    return {"all": Optimizations(), **without, "none": Optimizations.none()}


def with_openai(url: str, items: list[dict[str, str]]) -> None:
    """The program `qa`, written with the plain client."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")

    def ask(item: dict[str, str]) -> str:
        prompt = f"{RULES}Context: {item['context']}\nQ: {item['question']}\nA:"
        answer = client.completions.create(
            model="default", prompt=prompt, max_tokens=8, stop="\n", temperature=0, timeout=600
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(len(items)) as pool:
        list(pool.map(ask, items))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url")
    parser.add_argument("--items", type=int, default=24)
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS))
    parser.add_argument("--openai", action="store_true")
    wishes = parser.parse_args()
    items = [
        {"context": f"report {i % 4} about a city on a river", "question": f"What about district {i % 12}?"}
        for i in range(wishes.items)
    ]
    with contextlib.ExitStack() as stack:
        url = wishes.url or stack.enter_context(LocalServer("--log-level", "warning")).url
        set_default_backend(RuntimeEndpoint(url))
        qa.run(**items[0])
        print(HEADER)
        for name in wishes.programs:
            for what, options in variants().items():
                program = PROGRAMS[name]
                measure(url, name, what, lambda p=program, o=options: p.run_batch(items, temperature=0, optimize=o))
            if name == "qa" and wishes.openai:
                measure(url, name, "openai client", lambda: with_openai(url, items))


if __name__ == "__main__":
    main()
