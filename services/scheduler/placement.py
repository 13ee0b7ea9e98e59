"""Which worker each waiting request should go to, for this turn only. Leaves taking seats to the planner."""

from __future__ import annotations

from collections.abc import Mapping

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
MAX_EXAMINED = 64
"""Waiting requests looked at in one turn beyond the open seats."""


class _Room:
    """What one worker could still take in this turn."""

    __slots__ = ("pages", "pending", "seats", "worker")

    def __init__(self, worker: Worker, seats: Seats) -> None:
        self.worker = worker
        self.seats = worker.open_seats
        self.pages = seats.available(worker) - reserve(worker)
        self.pending = worker.pending_tokens() + RUNNING_COST_TOKENS * len(worker.running)

    def take(self, tokens: int, pages: int) -> None:
        self.seats -= 1
        self.pages -= pages
        self.pending += tokens + RUNNING_COST_TOKENS


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
        rooms = []
        for worker in self._fleet:
            worker.candidates = []
            if worker.open_seats > 0:
                rooms.append(_Room(worker, self._seats))
        if not rooms or not len(self._waiting):
            return
        left = MAX_EXAMINED + sum(room.seats for room in rooms)
        for request in self._waiting.in_order(self._clock.now()):
            left -= 1
            if left < 0 or not any(room.seats > 0 for room in rooms):
                return
            fitting = [room for room in rooms if request.total_tokens <= room.worker.max_request_tokens]
            if not fitting:
                continue
            if not self._place_one(request, fitting, group_worker.get(request.message.group_id)):
                return  # nobody overtakes a request that waits for pages

    def _place_one(self, request: Request, rooms: list[_Room], preferred: Worker | None) -> bool:
        wanted = -(-request.known // self._tree.page_size)
        if len(rooms) == 1:
            room = rooms[0]
            if room.seats > 0:
                room.take(request.known, 0)
                room.worker.candidates.append(request)
            return True
        match = self._tree.match(request.namespace, request.tokens(0, request.match_limit()))
        best: _Room | None = None
        best_key: tuple[float, int] = (0.0, 0)
        best_tokens = 0
        for room in rooms:
            hit = match.hits.get(room.worker.key)
            pages = wanted - (hit.num_pages if hit else 0)
            if room.seats <= 0 or pages > room.pages:
                continue
            tokens = request.known - max(match.num_tokens(room.worker.key), self._coming(request, room.worker))
            cost = 0.0 if room.worker is preferred else float(room.pending + tokens + 1)
            key = (cost, len(room.worker.running))
            if best is None or key < best_key:
                best, best_key, best_tokens = room, key, tokens
        if best is None:
            return False
        hit = match.hits.get(best.worker.key)
        best.take(best_tokens, wanted - (hit.num_pages if hit else 0))
        best.worker.candidates.append(request)
        return True

    def _coming(self, request: Request, worker: Worker) -> int:
        """Tokens of the longest common prefix with a prompt that is being computed there."""
        if not self._tree.enabled:
            return 0
        first_page = request.tokens(0, min(self._tree.page_size, request.match_limit()))
        best = 0
        for other in worker.prefilling:
            if other.namespace == request.namespace and other.prefill_tokens.startswith(first_page):
                best = max(best, common_tokens(request.tokens(0, request.match_limit()), other.prefill_tokens))
        return best


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
