"""What one scheduler for all workers is worth, and what it costs: throughput, hits, CPU, migration, cells.

    python benchmarks/fleet.py [--workers 1,2,4,8,32] [--chats 48] [--turns 4] [--cells 1,2,4] [--write docs/FILE]

Virtual time, real schedulers (fleet_simulation): the same conversations go through one scheduler with N workers, and
through N engines of one worker each behind a round-robin or an approximate-tree router (fleet_routers). Then prompts
of growing length are needed on another worker than the one that has them: moved or computed again. Then the key space
is split among cells.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if os.environ.get("PYTHONHASHSEED") != "0":  # the routers hash: the same run every time
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})

import structlog  # noqa: E402

from benchmarks.fleet_routers import ApproximateTree, KeySpace, RoundRobin, Router  # noqa: E402
from benchmarks.fleet_simulation import Cell, Conversations, Machine, Simulation  # noqa: E402
from shared import ints  # noqa: E402


@dataclass(frozen=True)
class Outcome:
    tokens_per_s: float
    hit_rate: float
    latency_ms: float  # of one output token, prompt included, mean over requests
    cpu_us: float  # of all schedulers, per output token
    moved_gb: float


class Routed:
    """Cells behind a router."""

    def __init__(self, cells: list[Cell], router: Router) -> None:
        self._cells = cells
        self._router = router

    def submit(self, rid: str, prompt: bytes, length: int, done: Callable[[list[int]], None]) -> None:
        chosen = self._router.choose(prompt)

        def finished(output: list[int]) -> None:
            self._router.finished(chosen)
            done(output)

        self._cells[chosen].submit(rid, prompt, length, finished)


def converse(workers: int, cells: int, router: str, machine: Machine, args: argparse.Namespace) -> Outcome:
    """The conversations of `workers` workers, split evenly among `cells` schedulers."""
    simulation = Simulation()
    share = workers // cells
    parts = [Cell(simulation, [f"c{c}w{w}" for w in range(share)], machine) for c in range(cells)]
    routers: dict[str, Callable[[], Router]] = {
        "round robin": lambda: RoundRobin(cells),
        "approximate tree": lambda: ApproximateTree(cells, simulation.clock.now),
        "one scheduler": lambda: RoundRobin(1),
        "by system prompt": lambda: KeySpace(cells, args.system_tokens // 2),
        "by conversation": lambda: KeySpace(cells, args.system_tokens + 32),
    }
    routed = Routed(parts, routers[router]())
    chats = Conversations(
        simulation, routed.submit, workers * args.chats, turns=args.turns, system_tokens=args.system_tokens
    )
    chats.start()
    seconds = simulation.run(lambda: chats.finished == chats.count)
    hits = sum(cell.counters["cache_hit_tokens"] for cell in parts)
    total = hits + sum(cell.counters["cache_miss_tokens"] for cell in parts)
    assert chats.finished == chats.count
    assert not any(cell.counters["internal_errors"] for cell in parts)
    return Outcome(
        chats.tokens_out / seconds,
        hits / total,
        1e3 * statistics.mean(chats.latencies),
        1e6 * sum(cell.cpu for cell in parts) / chats.tokens_out,
        sum(cell.moved_bytes for cell in parts) / 1e9,
    )


def compare_routers(args: argparse.Namespace) -> list[str]:
    lines = ["| workers | placed by | tokens/s | hit rate | ms per token | scheduler CPU, us per token | moved, GB |"]
    lines.append("|---|---|---|---|---|---|---|")
    for workers in args.workers:
        for name in ("one scheduler", "approximate tree", "round robin"):
            if workers == 1 and name != "one scheduler":
                continue
            cells = 1 if name == "one scheduler" else workers
            lines.append(f"| {workers} | {name} | {_row(converse(workers, cells, name, Machine(), args))} |")
            print(lines[-1], flush=True)
    return lines


def _row(o: Outcome) -> str:
    return f"{o.tokens_per_s:,.0f} | {o.hit_rate:.1%} | {o.latency_ms:.1f} | {o.cpu_us:.1f} | {o.moved_gb:.1f}"


def compare_cells(args: argparse.Namespace) -> list[str]:
    workers = max(args.workers)
    lines = [
        f"| cells of {workers} workers | split | tokens/s | hit rate | ms per token | CPU, us per token | moved, GB |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for cells in args.cells:
        for name in ("one scheduler",) if cells == 1 else ("by system prompt", "by conversation"):
            lines.append(f"| {cells} | {name} | {_row(converse(workers, cells, name, Machine(), args))} |")
            print(lines[-1], flush=True)
    return lines


def compare_migration(args: argparse.Namespace) -> list[str]:
    """A prompt of one worker that is full comes again, when only the other one has seats."""
    lines = ["| prefix, tokens | computed again, ms | with migration, ms | moved, MB |", "|---|---|---|---|"]
    for tokens in (256, 1024, 4096, 8192, 16384):
        again, _ = _second_answer(tokens, replace(Machine(), transfers=False))
        moved, num_bytes = _second_answer(tokens, Machine())
        lines.append(f"| {tokens} | {again * 1e3:.0f} | {moved * 1e3:.0f} | {num_bytes / 1e6:.0f} |")
        print(lines[-1], flush=True)
    return lines


def _second_answer(tokens: int, machine: Machine) -> tuple[float, int]:
    """(Seconds from request to first token, bytes moved) while the worker that has the prefix has no seat left."""
    simulation = Simulation()
    cell = Cell(simulation, ["w0", "w1"], replace(machine, slots=2))
    prompt = list(range(1, tokens + 1))
    ended: list[float] = []
    cell.submit("first", ints.pack(prompt), 1, lambda _: ended.append(simulation.clock.now()))
    other = list(range(20_000, 21_024))  # so that both workers' speeds are known
    cell.submit("other", ints.pack(other), 1, lambda _: ended.append(simulation.clock.now()))
    simulation.run(lambda: len(ended) == 2)
    for number in range(2):  # fill its seats: they share the prefix, so they go where it lies
        cell.submit(f"busy{number}", ints.pack([*prompt, number + 7]), 4000, lambda _: None)
    simulation.run(lambda: all(len(cell.outputs.get(f"busy{number}", [])) > 40 for number in range(2)))
    asked = simulation.clock.now()
    cell.submit("again", ints.pack([*prompt, 5]), 1, lambda _: ended.append(simulation.clock.now()))
    simulation.run(lambda: len(ended) == 3)
    return simulation.clock.now() - asked, cell.moved_bytes


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=numbers, default=[1, 2, 4, 8, 32])
    parser.add_argument("--chats", type=int, default=48, help="conversations per worker")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--system-tokens", type=int, default=512)
    parser.add_argument("--cells", type=numbers, default=[1, 2, 4])
    parser.add_argument("--only", choices=("routers", "migration", "cells"))
    parser.add_argument("--write", type=Path, help="put the tables into this file")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))
    parts = {"routers": compare_routers, "migration": compare_migration, "cells": compare_cells}
    tables = [table(args) for name, table in parts.items() if args.only in (None, name)]
    if args.write:
        args.write.write_text("\n\n".join("\n".join(table) for table in tables) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
