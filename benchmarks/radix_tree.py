"""Times the radix tree at growing sizes: match, placement, acquire, split, insert, append, evict. Needs no worker.

    python benchmarks/radix_tree.py [--tokens 10000,100000,1000000,10000000]

The tree is filled by its own interface with conversations on eight workers: each starts with one of a few system
prompts and goes on turn by turn; some branch off an earlier one at any token. Every size is measured with prompts of
4,000 tokens from all over the tree.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import sys
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from services.scheduler.page_pool import PagePool
from services.scheduler.radix_tree import RadixTree

PAGE_SIZE = 16
PROMPT_TOKENS = 4_000
WORKERS = tuple(f"worker-{number}/1" for number in range(8))
VOCABULARY = 50_000
TOKEN_BYTES = 4
SAMPLES = 400
OTHER_WORK = bytes(8 << 20)


@dataclass
class Fleet:
    """A tree, its pools, and the conversations in it that are long enough to ask for again."""

    tree: RadixTree
    pools: dict[str, PagePool]
    rng: random.Random
    prompts: list[tuple[bytes, str]] = field(default_factory=list)  # tokens, worker
    recent: list[tuple[bytes, str]] = field(default_factory=list)

    def cached_tokens(self) -> int:
        return sum(self.tree.cached_pages(worker) for worker in WORKERS) * PAGE_SIZE

    def tokens(self, count: int) -> bytes:
        return array("i", self.rng.choices(range(VOCABULARY), k=count)).tobytes()

    def serve(self, text: bytes, worker: str) -> None:
        """One request that computed `text` and ended."""
        lease = self.tree.acquire(self.tree.match(b"", text[:-TOKEN_BYTES]), worker)
        rest = text[lease.num_tokens * TOKEN_BYTES :]
        pages = self.take(worker, -(-len(rest) // (PAGE_SIZE * TOKEN_BYTES)))
        refused = self.tree.extend(lease, rest, pages)
        self.tree.release(lease)
        self.pools[worker].release(refused + self.tree.take_freed(worker))

    def take(self, worker: str, count: int) -> list[int]:
        pages = self.pools[worker].allocate(count)
        assert pages is not None, "the pools are made large enough"
        return pages


def fill(num_tokens: int, seed: int) -> Fleet:
    """A fleet with at least `num_tokens` cached tokens."""
    tree = RadixTree(PAGE_SIZE)
    pages = num_tokens // PAGE_SIZE + SAMPLES * PROMPT_TOKENS // PAGE_SIZE
    fleet = Fleet(tree, {worker: PagePool(pages) for worker in WORKERS}, random.Random(seed))
    for worker in WORKERS:
        tree.add_worker(worker)
    header = fleet.tokens(8)  # what the chat template begins every prompt with
    systems = [header + fleet.tokens(fleet.rng.randint(200, 1200)) for _ in range(max(1, num_tokens // 200_000))]
    for system in systems:
        for worker in WORKERS:
            fleet.serve(system, worker)
    while fleet.cached_tokens() < num_tokens:
        converse(fleet, systems, num_tokens)
    return fleet


def converse(fleet: Fleet, systems: list[bytes], limit: int) -> None:
    """One conversation, turn by turn: a fresh one, or an earlier one that goes another way from some token on."""
    rng = fleet.rng
    if fleet.recent and rng.random() < 0.3:
        text, worker = rng.choice(fleet.recent)
        text = text[: rng.randint(len(text) // 8, len(text) // 4) * TOKEN_BYTES]
        worker = worker if rng.random() < 0.7 else rng.choice(WORKERS)
    else:
        text, worker = rng.choice(systems), rng.choice(WORKERS)
    goal = (PROMPT_TOKENS + 1 if not fleet.prompts else rng.randint(1_000, 6_000)) * TOKEN_BYTES
    goal = max(goal, len(text) + 1)
    while len(text) < goal:
        text += fleet.tokens(rng.randint(10, 120) + rng.randint(20, 500))
        fleet.serve(text, worker)
    if len(text) > PROMPT_TOKENS * TOKEN_BYTES:
        fleet.prompts.append((text[: PROMPT_TOKENS * TOKEN_BYTES], worker))
    if len(fleet.recent) < 256:
        fleet.recent.append((text, worker))
    else:
        fleet.recent[rng.randrange(256)] = (text, worker)


def microseconds(action: Callable[[], object]) -> float:
    begun = time.perf_counter_ns()
    action()
    return (time.perf_counter_ns() - begun) / 1e3


@dataclass
class Row:
    """Medians in µs, but for `match_p99`; `cold` is a match with nothing of the tree in the processor's own caches."""

    tokens: int
    nodes: int
    bytes_per_token: float
    depth: float
    match: float
    match_p99: float
    cold: float
    placement: float
    acquire: float
    split: float
    insert: float
    append: float
    evict: float
    check_ms: float


def measure(num_tokens: int, seed: int) -> Row:
    fleet = fill(num_tokens, seed)
    tree, rng = fleet.tree, fleet.rng
    gc.collect()
    gc.disable()  # as timeit does: a collection belongs to no single call
    nodes, tokens, size = tree.num_nodes, fleet.cached_tokens(), memory(tree)
    check_ms = microseconds(tree.check) / 1e3
    asked = [fleet.prompts[index % len(fleet.prompts)] for index in rng.sample(range(1 << 30), SAMPLES)]
    if len(fleet.prompts) >= SAMPLES:
        asked = rng.sample(fleet.prompts, SAMPLES)
    deep = statistics.mean(depth(tree, text, worker) for text, worker in asked)
    matches, cold, placements = ask(fleet, asked)
    acquires = [acquire(tree, text, worker) for text, worker in asked]
    splits, inserts, appends = change(fleet, asked)
    gc.enable()
    return Row(
        tokens=tokens,
        nodes=nodes,
        bytes_per_token=size / tokens,
        depth=deep,
        match=statistics.median(matches),
        match_p99=statistics.quantiles(matches, n=100)[98],
        cold=statistics.median(cold),
        placement=statistics.median(placements),
        acquire=statistics.median(acquires),
        split=statistics.median(splits),
        insert=statistics.median(inserts),
        append=statistics.median(appends),
        evict=evict(fleet),
        check_ms=check_ms,
    )


def best_of_rounds(asked: list[tuple[bytes, str]], act: Callable[[bytes, str], object], between: bytes) -> list[float]:
    """µs for each prompt: the best of three rounds, since other processes only ever add time.

    A round goes through all prompts before one comes again. Reading `between` first empties the processor's own caches
    of everything but the prompt, as the rest of a scheduler might.
    """
    best = [math.inf] * len(asked)
    for _ in range(3):
        for number, (text, worker) in enumerate(asked):
            between.count(1)
            prompt = text[:-TOKEN_BYTES]
            best[number] = min(best[number], microseconds(partial(act, prompt, worker)))
    return best


def ask(fleet: Fleet, asked: list[tuple[bytes, str]]) -> tuple[list[float], list[float], list[float]]:
    """Match (and the exact length on one worker), the same with cold caches, and the choice of a worker."""
    tree = fleet.tree
    queued = {worker: fleet.rng.randrange(4_000) for worker in WORKERS}

    def match(prompt: bytes, worker: str) -> None:
        assert tree.match(b"", prompt).num_tokens(worker) == PROMPT_TOKENS - 1

    def choose(prompt: bytes, _worker: str) -> str:
        """The worker with the least left to compute, its queue included."""
        found = tree.match(b"", prompt)
        return min(queued, key=lambda worker: queued[worker] - found.num_tokens(worker))

    return (
        best_of_rounds(asked, match, b""),
        best_of_rounds(asked, match, OTHER_WORK),
        best_of_rounds(asked, choose, b""),
    )


def acquire(tree: RadixTree, text: bytes, worker: str) -> float:
    found = tree.match(b"", text[:-TOKEN_BYTES])
    begun = time.perf_counter_ns()
    lease = tree.acquire(found, worker)
    taken = (time.perf_counter_ns() - begun) / 1e3
    tree.release(lease)
    return taken


def change(fleet: Fleet, asked: list[tuple[bytes, str]]) -> tuple[list[float], list[float], list[float]]:
    """Split: acquire where the match ends inside a node. Insert: the rest of a 4,000-token prompt that shares a few
    hundred tokens. Append: one page of a decoding request.
    """
    tree = fleet.tree
    splits, inserts, appends = [], [], []
    for text, worker in asked:
        shared = text[: fleet.rng.randint(150, 900) * TOKEN_BYTES]
        match = tree.match(b"", shared)
        before = tree.num_nodes
        begun = time.perf_counter_ns()
        lease = tree.acquire(match, worker)
        taken = (time.perf_counter_ns() - begun) / 1e3
        if tree.num_nodes > before:
            splits.append(taken)
        rest = shared[lease.num_tokens * TOKEN_BYTES :] + fleet.tokens(PROMPT_TOKENS - len(shared) // TOKEN_BYTES)
        pages = fleet.take(worker, len(rest) // (PAGE_SIZE * TOKEN_BYTES))
        inserts.append(microseconds(partial(tree.extend, lease, rest, pages)))
        for _ in range(4):
            page, decoded = fleet.take(worker, 1), fleet.tokens(PAGE_SIZE)
            appends.append(microseconds(partial(tree.extend, lease, decoded, page)))
        tree.release(lease)
    return splits, inserts, appends


def evict(fleet: Fleet) -> float:
    """µs per page when 16 pages are wanted at a time."""
    times = []
    for number in range(SAMPLES // 4):
        worker = WORKERS[number % len(WORKERS)]
        if fleet.tree.evictable_pages(worker) < 16:
            continue
        begun = time.perf_counter_ns()
        freed = fleet.tree.evict(worker, 16)
        times.append((time.perf_counter_ns() - begun) / 1e3 / len(freed))
    return statistics.median(times)


def depth(tree: RadixTree, text: bytes, worker: str) -> int:
    """Nodes on the path of a prompt."""
    node, count = tree.match(b"", text).hits[worker].node, 0
    while node.parent is not None:
        node, count = node.parent, count + 1
    return count


def memory(tree: RadixTree) -> int:
    """Bytes of all nodes, copies, keys and pages."""
    size = sys.getsizeof
    total = 0
    stack = list(tree._store.roots.values())
    while stack:
        node = stack.pop()
        stack.extend(node.children.values())
        total += size(node) + size(node.tokens) + size(node.children) + size(node.copies)
        total += size(node.key) if node.key is not node.tokens else 0
        for copy in node.copies.values():
            total += size(copy) + size(copy.pages) + size(copy.keys)
    return total


HEAD = (
    f"{'tokens':>10} {'nodes':>7} {'B/token':>7} {'depth':>5} {'match':>7} {'p99':>7} {'cold':>7} {'placement':>9} "
    f"{'acquire':>7} {'split':>6} {'insert':>6} {'append':>6} {'evict':>6} {'check ms':>8}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="10000,100000,1000000,10000000", help="tree sizes, in cached tokens")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(
        f"{PROMPT_TOKENS:,}-token prompts, pages of {PAGE_SIZE}, {len(WORKERS)} workers; medians in µs, evict per page"
    )
    print(HEAD)
    rows = []
    for number in (int(word) for word in arguments.tokens.split(",")):
        row = measure(number, arguments.seed)
        rows.append(row)
        print(
            f"{row.tokens:>10,} {row.nodes:>7,} {row.bytes_per_token:>7.1f} {row.depth:>5.1f} {row.match:>7.1f} "
            f"{row.match_p99:>7.1f} {row.cold:>7.1f} {row.placement:>9.1f} {row.acquire:>7.1f} {row.split:>6.1f} "
            f"{row.insert:>6.1f} {row.append:>6.1f} {row.evict:>6.2f} {row.check_ms:>8.1f}",
            flush=True,
        )
    if len(rows) > 1:
        first, last = rows[0], rows[-1]
        print(
            f"smallest to largest tree: match x{last.match / first.match:.2f}, "
            f"placement x{last.placement / first.placement:.2f}, tokens x{last.tokens / first.tokens:.0f}"
        )


if __name__ == "__main__":
    main()
