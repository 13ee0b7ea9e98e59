"""What the compiler saves: requests, computed tokens, steps and time, with each optimisation on and off.

    python benchmarks/programs.py [--items 24] [--optimisations prefix order ...] [--programs qa steps fork call]

Two servers with the small model are started, one of them with a cache that holds little. Counts come from their
/metrics: HTTP requests (with those that only tokenise), prompts admitted, their tokens, how many of these were
computed (in all and for each item), and steps of the worker. The first table switches one optimisation off in the
program in which it shows and marks the count that it moves; the second compares whole programs with the same logic over
the plain openai client.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from program_cases import CASES, WHOLE, Case, Noise, Plain, items, qa

from radixfleet import Optimizations, RuntimeEndpoint, flush_cache, set_default_backend
from radixfleet.local_server import LocalServer

SMALL_TOKENS = 1024
COLUMNS = ("HTTP", "prompts", "tokens", "computed", "per item", "hit rate", "steps", "seconds", "items/s")
HEADER = f"{'':<12}{'':<16}" + "".join(f"{name:>10}" for name in COLUMNS)
COUNTERS = {
    "HTTP": "radixfleet_http_requests_total",
    "prompts": "sglang:num_requests_total",
    "hit": "sglang_cache_hit_total",
    "computed": "sglang_cache_miss_total",
    "steps": "radixfleet_scheduler_steps_total",
}
Row = dict[str, float]


def counts(url: str) -> Row:
    """Counters of the server, once it has nothing left to do."""
    found = dict.fromkeys(COUNTERS, 0.0)
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        for column, wanted in COUNTERS.items():
            if name.partition("{")[0] == wanted:
                found[column] += float(value)
    return found


def settled_counts(url: str) -> Row:
    """The picture behind /metrics is sent once a second: ask until it stands still."""
    before = counts(url)
    while True:
        time.sleep(1.1)
        after = counts(url)
        if {**after, "HTTP": 0.0} == {**before, "HTTP": 0.0}:
            return after
        before = after


def measure(url: str, num_items: int, work: Callable[[], Any]) -> Row:
    """What the work cost, on an empty cache."""
    flush_cache()
    before = settled_counts(url)
    started = time.monotonic()
    work()
    seconds = time.monotonic() - started
    own = counts(url)["HTTP"] - before["HTTP"] - 1
    row = {name: value - before[name] for name, value in settled_counts(url).items()}
    tokens = row["hit"] + row["computed"]
    rate = row["hit"] / tokens if tokens else 0.0
    speed = {"seconds": seconds, "items/s": num_items / seconds}
    return {**row, "HTTP": own, "tokens": tokens, "per item": row["computed"] / num_items, "hit rate": rate, **speed}


def show(name: str, what: str, row: Row, own: str = "") -> None:
    """One line of a table; `own` is marked."""
    shown = []
    for column in COLUMNS:
        value = row[column]
        text = (
            f"{value:.1%}" if column == "hit rate" else f"{value:.2f}" if value < 100 and value % 1 else f"{value:.0f}"
        )
        shown.append(f"{'*' + text if column == own else text:>10}")
    print(f"{name:<12}{what:<16}" + "".join(shown), flush=True)


def compare(case: Case, url: str, num_items: int) -> dict[str, Any]:
    """One optimisation on and off."""
    work = case.items(num_items)[: max(2, int(num_items * case.share_of_items))]
    threads = case.threads or len(work)
    rows = {}
    for what, options in (("on", Optimizations()), ("off", Optimizations(**{case.optimisation: False}))):
        run = lambda o=options: case.program.run_batch(work, temperature=0, num_threads=threads, optimize=o)  # noqa: E731
        rows[what] = measure(url, len(work), run)
        show(
            case.optimisation if what == "on" else "",
            f"{case.program.function.__name__} {what}",
            rows[what],
            case.count,
        )
    return {"optimisation": case.optimisation, "count": case.count, **rows}


def whole(name: str, url: str, num_items: int) -> dict[str, Any]:
    """A program with everything on, with everything off, and its logic over the openai client."""
    work, rows = items(num_items), {}
    plain = Plain(url)
    for what, run in (
        ("all", lambda: WHOLE[name].run_batch(work, temperature=0)),
        ("none", lambda: WHOLE[name].run_batch(work, temperature=0, optimize=False)),
        ("openai client", lambda: plain.run(name, work)),
    ):
        rows[what] = measure(url, len(work), run)
        show(name if what == "all" else "", what, rows[what])
    return {"program": name, **rows}


@contextlib.contextmanager
def server(*flags: str) -> Iterator[str]:
    """A server that has computed something already, as the default backend."""
    with LocalServer("--log-level", "warning", *flags) as started:
        set_default_backend(RuntimeEndpoint(started.url))
        Noise.url = started.url
        qa.run(**items(1)[0])
        yield started.url


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--items", type=int, default=24)
    parser.add_argument("--optimisations", nargs="*", default=[case.optimisation for case in CASES])
    parser.add_argument("--programs", nargs="*", default=list(WHOLE))
    parser.add_argument("--json", type=Path, help="file for the numbers")
    wishes = parser.parse_args()
    results: list[dict[str, Any]] = []
    wanted = [case for case in CASES if case.optimisation in wishes.optimisations]
    print(HEADER)
    if any(case.small for case in wanted):
        with server("--max-total-tokens", str(SMALL_TOKENS)) as url:
            results += [compare(case, url, wishes.items) for case in wanted if case.small]
    with server() as url:
        results += [compare(case, url, wishes.items) for case in wanted if not case.small]
        results += [whole(name, url, wishes.items) for name in wishes.programs]
    if wishes.json:
        wishes.json.write_text(json.dumps(results, indent=1) + "\n")
    still = [r for r in results if "count" in r and r["on"][r["count"]] == r["off"][r["count"]]]
    for result in still:
        print(f"{result['optimisation']} moved no count")
    sys.exit(bool(still))


if __name__ == "__main__":
    main()
