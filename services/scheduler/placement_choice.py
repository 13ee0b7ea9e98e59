"""What each way to serve a waiting request costs, and the cheapest one. Leaves doing it to placement.

    compute   on a worker what of the request is not cached there
    move      the pages another worker has to it first (or wait for those that are on their way), compute the rest
    wait      for a prompt with the same beginning that is being computed elsewhere, then move its pages

Cost in seconds: the work before the request there, the request's own, and its own once more, for it delays everybody
who comes next. Where nothing was measured yet, seconds are tokens and pages stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from services.scheduler.lease import Hit
from services.scheduler.migration import Migration, Transfer
from services.scheduler.migration_source import Source, best_source, tier_sources
from services.scheduler.planner import reserve
from services.scheduler.radix_tree import RadixTree
from services.scheduler.request import Request
from services.scheduler.seats import Seats
from services.scheduler.worker import Worker

RUNNING_COST_TOKENS = 32
"""What one seated request costs the others, in prompt tokens: it has a row in every step."""


class Placed(NamedTuple):
    """A choice and what it was based on; taken again for a moment as long as there is room."""

    worker: Worker
    tokens: int  # to compute
    pages: int  # to allocate
    at: float
    first: Source | Transfer | None = None  # what is to bring pages before
    wait: bool = False  # until somebody else's prompt is computed


class Room:
    """What one worker could still take in this turn."""

    __slots__ = ("pages", "pending", "seats", "worker")

    def __init__(self, worker: Worker, seats: Seats) -> None:
        self.worker = worker
        self.seats = worker.open_seats
        self.pages = seats.available(worker) - reserve(worker)
        self.pending = worker.pending_tokens() + RUNNING_COST_TOKENS * len(worker.running)

    def has_room(self, pages: int) -> bool:
        return self.seats > 0 and pages <= self.pages

    def take(self, request: Request, tokens: int, pages: int) -> None:
        self.seats -= 1
        self.pages -= pages
        self.pending += tokens + RUNNING_COST_TOKENS
        self.worker.candidates.append(request)


class Chooser:
    """For one turn. `rooms` are those of all workers, whether they have a seat or not."""

    def __init__(
        self, tree: RadixTree, migration: Migration, rooms: Mapping[Worker, Room], now: float, *, recompute: bool
    ) -> None:
        self._tree = tree
        self._migration = migration
        self._rooms = rooms
        self._now = now
        self._recompute = recompute
        self._movable = migration.possible
        self._rates = migration.rates.prefill_rates(rooms)

    def choose(self, request: Request, fitting: list[Room], preferred: Worker | None) -> Placed | None:
        """The cheapest way among the workers with room, or None where none has any."""
        tokens = request.tokens(0, request.match_limit())
        hits = self._tree.match(request.namespace, tokens).hits
        source = self._source(request, hits)
        coming = self._coming(request, tokens)
        best: Placed | None = None
        best_cost = (0.0, 0)
        for room in fitting:
            hit = hits.get(room.worker.key)
            pages = -(-request.known // self._tree.page_size) - (hit.num_pages if hit else 0)
            if not room.has_room(pages):
                continue
            for placed, seconds in self._ways(request, tokens, room, hits, pages, source, coming):
                free = room.worker is preferred and placed.first is None and not placed.wait
                cost = (0.0 if free else seconds, len(room.worker.running))
                if best is None or cost < best_cost:
                    best, best_cost = placed, cost
        return best

    def _ways(
        self,
        request: Request,
        tokens: bytes,
        room: Room,
        hits: Mapping[str, Hit],
        pages: int,
        source: Source | None,
        coming: Mapping[Worker, int],
    ) -> list[tuple[Placed, float]]:
        worker, size = room.worker, self._tree.page_size
        hit = hits.get(worker.key)
        found = hit.num_tokens if hit else 0
        left = request.known - max(found, coming.get(worker, 0))
        ways = [(Placed(worker, left, pages, self._now), self._seconds(room, left))]
        if not self._movable or request.failed_transfers:
            return ways
        held = hit.num_pages if hit else 0
        transfer = self._migration.under_way(worker, request.namespace, tokens)
        if transfer is not None and len(transfer.prefix) > 4 * size * held:
            left = request.known - len(transfer.prefix) // 4
            moving = self._migration.seconds(transfer.source, worker, 0, transfer.tier)
            ways.append((Placed(worker, left, pages, self._now, transfer), self._seconds(room, left, moving)))
        else:
            for giver in (source, *tier_sources(worker, hits)):
                if giver is not None and giver.pages > held and (giver.tier or giver.worker is not worker):
                    ways += self._moves(request, room, pages, giver, held)
        ways += self._waits(request, room, pages, held, coming)
        return ways if self._recompute or len(ways) == 1 else ways[1:]

    def _moves(self, request: Request, room: Room, pages: int, source: Source, held: int) -> list[tuple[Placed, float]]:
        if not self._rates[room.worker] and self._recompute:
            return []
        left = request.known - source.pages * self._tree.page_size
        moving = self._migration.seconds(source.worker, room.worker, source.pages - held, source.tier)
        return [(Placed(room.worker, left, pages, self._now, source), self._seconds(room, left, moving))]

    def _waits(
        self, request: Request, room: Room, pages: int, held: int, coming: Mapping[Worker, int]
    ) -> list[tuple[Placed, float]]:
        """For each worker that computes a longer beginning of it than is here or on its way here."""
        ways = []
        for other, tokens in coming.items():
            num_pages = tokens // self._tree.page_size
            here = max(held, coming.get(room.worker, 0) // self._tree.page_size)
            if other is room.worker or num_pages <= here or not self._rates[room.worker]:
                continue
            if not (other.hello.kv_endpoints and room.worker.hello.kv_endpoints):
                continue
            ready = self._rooms[other].pending / (self._rates[other] or 1.0)
            moving = self._migration.seconds(other, room.worker, num_pages - held)
            left = request.known - num_pages * self._tree.page_size
            seconds = self._seconds(room, left, moving, not_before=ready)
            ways.append((Placed(room.worker, left, pages, self._now, wait=True), seconds))
        return ways

    def _seconds(self, room: Room, left: int, moving: float = 0.0, not_before: float = 0.0) -> float:
        rate = self._rates[room.worker] or 1.0
        return max(room.pending / rate, not_before) + moving + (2 * left + 1) / rate

    def _source(self, request: Request, hits: Mapping[str, Hit]) -> Source | None:
        if not self._movable or request.failed_transfers:
            return None
        return best_source(self._migration.workers, hits)

    def _coming(self, request: Request, tokens: bytes) -> dict[Worker, int]:
        """Tokens of the longest common prefix with a prompt that is being computed, or will be in this turn."""
        found: dict[Worker, int] = {}
        if not self._tree.enabled:
            return found
        first_page = tokens[: 4 * self._tree.page_size]
        for worker in self._rooms:
            prompts = [other.prefill_tokens for other in worker.prefilling if other.namespace == request.namespace]
            prompts += [other.message.prompt_ids for other in worker.candidates if other.namespace == request.namespace]
            alike = [prompt for prompt in prompts if prompt.startswith(first_page)]
            common = max((common_tokens(tokens, prompt) for prompt in alike), default=0)
            if common:
                found[worker] = common
        return found


def common_tokens(a: bytes, b: bytes) -> int:
    """Length in tokens of the longest common prefix, by bisection over memory compares."""
    low, high = 0, min(len(a), len(b)) // 4
    while low < high:
        middle = (low + high + 1) // 2
        if a[4 * low : 4 * middle] == b[4 * low : 4 * middle]:
            low = middle
        else:
            high = middle - 1
    return low
