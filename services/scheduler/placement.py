"""Which worker each waiting request should go to, for this turn only. Leaves costs to the choice."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from services.scheduler.fleet import Fleet
from services.scheduler.migration import Migration, Transfer
from services.scheduler.placement_choice import Chooser, Placed, Room
from services.scheduler.radix_tree import RadixTree
from services.scheduler.request import Request
from services.scheduler.seats import Seats
from services.scheduler.waiting import WaitingQueue
from services.scheduler.worker import Worker
from shared.clock import Clock

PLACED_FOR_S = 0.05
"""A choice is not made again in each turn while its worker is busy with the steps it has."""
MAX_EXAMINED = 64
"""Waiting requests looked at in one turn beyond the open seats."""


class Placement:
    """A request goes where it costs least among the workers that have room for it, so none idles while another
    one queues; requests of a group go where the group is. Whoever waits for pages to be moved, or for a prompt like
    its own, is passed over and holds up nobody.
    """

    def __init__(
        self,
        tree: RadixTree,
        seats: Seats,
        waiting: WaitingQueue,
        fleet: Fleet,
        clock: Clock,
        migration: Migration,
        *,
        recompute: bool = True,
    ) -> None:
        self._tree = tree
        self._seats = seats
        self._waiting = waiting
        self._fleet = fleet
        self._clock = clock
        self._migration = migration
        self._recompute = recompute

    def place(self, group_worker: Mapping[str, Worker]) -> None:
        """Set every worker's `candidates`, in the order in which they should be admitted."""
        for worker in self._fleet:
            worker.candidates = []
        if not len(self._waiting) or all(worker.open_seats <= 0 for worker in self._fleet):
            return
        now = self._clock.now()
        rooms = {worker: Room(worker, self._seats) for worker in self._fleet}
        chooser = Chooser(self._tree, self._migration, rooms, now, recompute=self._recompute)
        groups: dict[str, Worker] = {}  # those that are placed for the first time in this turn
        seats = sum(max(room.seats, 0) for room in rooms.values())
        for request in islice(self._waiting.in_order(now), seats + MAX_EXAMINED):
            if seats <= 0:
                return
            if request.transfer is not None:
                continue
            fitting = [
                room
                for room in rooms.values()
                if room.worker.open_seats > 0 and request.total_tokens <= room.worker.max_request_tokens
            ]
            if not fitting:
                continue
            if len(fitting) == 1 and not self._migration.possible:
                if fitting[0].seats > 0:
                    fitting[0].take(request, request.known, 0)
                    seats -= 1
                continue
            group = request.message.group_id
            preferred = groups.get(group) or group_worker.get(group)
            placed = self._recent(request, rooms, now) or chooser.choose(request, fitting, preferred)
            if placed is None:
                return  # nobody overtakes a request that waits for pages
            if self._seat(request, placed, rooms):
                seats -= 1
                if group:
                    groups[group] = placed.worker

    def _recent(self, request: Request, rooms: Mapping[Worker, Room], now: float) -> Placed | None:
        """The last choice, while it is fresh and still possible."""
        placed = request.placement
        if placed is None or placed.wait or now - placed.at > PLACED_FOR_S:
            return None
        room = rooms.get(placed.worker)
        return placed if room is not None and room.has_room(placed.pages) else None

    def _seat(self, request: Request, placed: Placed, rooms: Mapping[Worker, Room]) -> bool:
        """Make the request a candidate there, or see to what has to come first. False: it takes no seat now."""
        request.placement = placed
        first = placed.first
        if isinstance(first, Transfer):
            self._migration.wait_for(first, request)
            return False
        if placed.wait or (first is not None and self._migration.start(request, first, placed.worker)):
            return False
        if first is not None and not self._recompute:
            return False  # it is asked again when there is room
        tokens = placed.tokens if first is None else request.known
        rooms[placed.worker].take(request, tokens, placed.pages)
        return True
