"""Which worker each waiting request should go to, for this turn only. Leaves taking seats to the planner."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

from services.scheduler.fleet import Fleet
from services.scheduler.planner import reserve
from services.scheduler.radix_tree import RadixTree
from services.scheduler.request import Request
from services.scheduler.seats import Seats
from services.scheduler.waiting import WaitingQueue
from services.scheduler.worker import Worker
from shared.clock import Clock

RUNNING_COST_TOKENS = 32
"""What one seated request costs the others, in prompt tokens: it has a row in every step."""
PLACED_FOR_S = 0.05
"""A choice is not made again in each turn while its worker is busy with the steps it has."""
MAX_EXAMINED = 64
"""Waiting requests looked at in one turn beyond the open seats."""


class Placed(NamedTuple):
    """A choice and what it was based on; taken again for a moment as long as there is room."""

    worker: Worker
    tokens: int  # to compute
    pages: int  # to allocate
    at: float


class _Room:
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


class Placement:
    """Cost of a worker: the work before the request there, and what of the request it would have to compute.

    A request goes where it costs least among the workers that have room for it, so none idles while
    another one queues; requests of a group go where the group is.
    """

    def __init__(self, tree: RadixTree, seats: Seats, waiting: WaitingQueue, fleet: Fleet, clock: Clock) -> None:
        self._tree = tree
        self._seats = seats
        self._waiting = waiting
        self._fleet = fleet
        self._clock = clock

    def place(self, group_worker: Mapping[str, Worker]) -> None:
        """Set every worker's `candidates`, in the order in which they should be admitted."""
        rooms: dict[Worker, _Room] = {}
        for worker in self._fleet:
            worker.candidates = []
            if worker.open_seats > 0 and len(self._waiting):
                rooms[worker] = _Room(worker, self._seats)
        if not rooms:
            return
        now = self._clock.now()
        groups: dict[str, Worker] = {}  # those that are placed for the first time in this turn
        seats = sum(room.seats for room in rooms.values())
        for request in islice(self._waiting.in_order(now), seats + MAX_EXAMINED):
            if seats <= 0:
                return
            fitting = [room for room in rooms.values() if request.total_tokens <= room.worker.max_request_tokens]
            if not fitting:
                continue
            if len(fitting) == 1:
                if fitting[0].seats > 0:
                    fitting[0].take(request, request.known, 0)
                    seats -= 1
                continue
            group = request.message.group_id
            home = self._place_one(request, rooms, fitting, groups.get(group) or group_worker.get(group), now)
            if home is None:
                return  # nobody overtakes a request that waits for pages
            seats -= 1
            if group:
                groups[group] = home

    def _place_one(
        self, request: Request, rooms: dict[Worker, _Room], fitting: list[_Room], preferred: Worker | None, now: float
    ) -> Worker | None:
        placed = request.placement
        room = rooms.get(placed.worker) if placed and now - placed.at <= PLACED_FOR_S else None
        if placed is None or room is None or not room.has_room(placed.pages):
            placed = request.placement = self._choose(request, fitting, preferred, now)
        if placed is None:
            return None
        rooms[placed.worker].take(request, placed.tokens, placed.pages)
        return placed.worker

    def _choose(self, request: Request, rooms: list[_Room], preferred: Worker | None, now: float) -> Placed | None:
        """The cheapest worker with room, or None."""
        tokens = request.tokens(0, request.match_limit())
        hits = self._tree.match(request.namespace, tokens).hits
        wanted = -(-request.known // self._tree.page_size)
        best: Placed | None = None
        best_key = (0.0, 0)
        for room in rooms:
            worker = room.worker
            hit = hits.get(worker.key)
            pages = wanted - (hit.num_pages if hit else 0)
            if not room.has_room(pages):
                continue
            found = hit.num_tokens if hit else 0
            left = request.known - (max(found, self._coming(request, tokens, worker)) if worker.prefilling else found)
            key = (0.0 if worker is preferred else float(room.pending + left + 1), len(worker.running))
            if best is None or key < best_key:
                best, best_key = Placed(worker, left, pages, now), key
        return best

    def _coming(self, request: Request, tokens: bytes, worker: Worker) -> int:
        """Tokens of the longest common prefix with a prompt that is being computed there."""
        if not self._tree.enabled:
            return 0
        first_page = tokens[: 4 * self._tree.page_size]
        alike = [
            other
            for other in worker.prefilling
            if other.namespace == request.namespace and other.prefill_tokens.startswith(first_page)
        ]
        return max((common_tokens(tokens, other.prefill_tokens) for other in alike), default=0)


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
