"""From arrival to the end: the only place that changes a request's state. Leaves planning and sockets to others."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from services.scheduler.inflight import InflightStep
from services.scheduler.metrics import Metrics
from services.scheduler.request import Request, State
from services.scheduler.seats import Seats
from services.scheduler.waiting import WaitingQueue
from services.scheduler.worker import Worker
from shared.clock import Clock
from shared.messages.stream import Finish, FinishReason

log = structlog.get_logger(__name__)

MAX_FAULTS = 3
"""A request whose step failed on so many workers is taken for the cause."""
MAX_GROUPS = 8192


def error(message: str, status: int = 500) -> Finish:
    return Finish(FinishReason.ERROR, message=message, status=status)


def abort(message: str, status: int = 0) -> Finish:
    """Status 0: somebody's wish, so the answer so far is an answer; else the failure a client is told."""
    return Finish(FinishReason.ABORT, message=message, status=status)


class Lifecycle:
    """`touch(request)` is called whenever a detokenizer must hear something about it.

    (COMPILING --admit-->) WAITING --start--> RUNNING --finish--> FINISHED --forget--> (gone)
       ^                  |
       +-- SUSPENDED <----+ suspend: pages ran out, the worker was lost or leaves
           (until no row is in flight)
    """

    def __init__(
        self,
        seats: Seats,
        waiting: WaitingQueue,
        metrics: Metrics,
        clock: Clock,
        touch: Callable[[Request], None],
    ) -> None:
        self.requests: dict[str, Request] = {}
        self.seats = seats
        self.waiting = waiting
        self.compiling: dict[str, Request] = {}
        self.suspended: dict[str, Request] = {}
        self.finished: dict[str, Request] = {}  # until their frontends have acknowledged
        self.num_running = 0
        self.group_worker: dict[str, Worker] = {}  # where the requests of a group went last
        self.on_end: Callable[[Request], None] = _nothing  # called once for every request that came in
        self._metrics = metrics
        self._clock = clock
        self._touch = touch

    @property
    def num_live(self) -> int:
        return len(self.requests) - len(self.finished)

    def accept(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.waiting.add(request)
        self._touch(request)

    def compile(self, request: Request, cancel: Callable[[], None]) -> None:
        """Its constraint is being compiled; `cancel` gives that up. No detokenizer hears of it yet."""
        self.requests[request.request_id] = request
        self.compiling[request.request_id] = request
        request.state = State.COMPILING
        request.cancel = cancel

    def admit(self, request: Request) -> None:
        """Its constraint is compiled."""
        del self.compiling[request.request_id]
        request.state = State.WAITING
        request.cancel = None
        self.accept(request)

    def dismiss(self, request: Request) -> None:
        """Its constraint cannot be compiled: it was never here."""
        del self.compiling[request.request_id]
        del self.requests[request.request_id]
        request.state = State.FINISHED
        request.cancel = None
        self.on_end(request)

    def start(self, request: Request) -> None:
        """It has a seat now."""
        self.waiting.remove(request)
        request.state = State.RUNNING
        request.blocker = request.placement = None
        self.num_running += 1
        if request.message.pin:
            self.seats.pins.drop(request.message.pin)  # its own lease holds the path from now on
        group = request.message.group_id
        if group and request.worker is not None:
            self.group_worker[group] = request.worker
            if len(self.group_worker) > MAX_GROUPS:
                del self.group_worker[next(iter(self.group_worker))]

    def finish(self, request: Request, finish: Finish) -> None:
        """End it for good, in whatever state it is. Does nothing where it has ended."""
        if request.finish is not None:
            return
        if request.state is State.RUNNING:
            self.num_running -= 1
            self.seats.leave(request, pin=finish.reason in (FinishReason.STOP, FinishReason.LENGTH))
        elif request.state is State.SUSPENDED:
            self.suspended.pop(request.request_id, None)
        elif request.state is State.COMPILING:
            del self.compiling[request.request_id]
            if request.cancel is not None:
                request.cancel()
        else:
            self.waiting.remove(request)
        request.state = State.FINISHED
        request.finish = finish
        request.finished_at = self._clock.now()
        self.finished[request.request_id] = request
        self._metrics.finished(request)
        self._touch(request)
        self.on_end(request)

    def suspend(self, request: Request) -> None:
        """Take its seat away; what is in flight is still accepted, then it waits again."""
        assert request.state is State.RUNNING
        self.num_running -= 1
        self.seats.leave(request)
        self._suspended(request)

    def settled(self, request: Request) -> None:
        """A row of a suspended request has come back."""
        if request.state is State.SUSPENDED and request.inflight_rows == 0:
            del self.suspended[request.request_id]
            request.state = State.WAITING
            request.resumed = True
            self.waiting.add(request)

    def blame(self, worker: Worker) -> None:
        """One of its requests may be why it failed."""
        for request in worker.running.values():
            request.faults += 1

    def lose_worker(self, worker: Worker, *, blame: bool) -> None:
        """Its steps never come back: settle their rows, and let its requests go on elsewhere.

        With `blame`, the requests of its steps in flight count it against themselves.
        """
        self.group_worker = {group: home for group, home in self.group_worker.items() if home is not worker}
        seated = list(worker.running.values())
        worker.running.clear()
        for request in seated:
            self.num_running -= 1
            self.seats.lose(request)
            self._suspended(request)
        computing = dict.fromkeys(request for step in worker.inflight for request in step.rows())
        worker.inflight.clear()
        for request in computing:
            request.faults += blame
        # Whoever has rows here has none elsewhere, so none is left, not even of a step that could not be sent.
        for request in (*computing, *seated):
            request.inflight_rows = 0
            if request.guide is not None:
                request.guide.lose_rows()
        for request in dict.fromkeys((*computing, *seated)):
            if request.faults >= MAX_FAULTS:
                self.finish(request, error(f"{request.faults} workers failed while computing this request"))
            else:
                self.settled(request)

    def abandon(self, step: InflightStep) -> None:
        """A step of a lost worker was settled in part: none of its rows is in flight any more."""
        for request in step.rows():
            request.inflight_rows = 0
            self.settled(request)

    def forget(self, request: Request) -> None:
        """Its frontend holds the last chunk, or is gone."""
        if self.requests.get(request.request_id) is request:
            del self.requests[request.request_id]
            self.finished.pop(request.request_id, None)

    def _suspended(self, request: Request) -> None:
        request.state = State.SUSPENDED
        if request.guide is not None:
            request.guide.guesses = ()  # they were for a row that is not sent
        request.retractions += 1
        request.resumed = True
        self._metrics.count("retractions")
        self.suspended[request.request_id] = request
        self.settled(request)


def _nothing(request: Request) -> None:
    """For a listener nobody has set."""
