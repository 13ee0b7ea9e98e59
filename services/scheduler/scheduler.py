"""The loop: read the inbox, place who waits, plan and dispatch each worker's step, send what came out.

All state lives in one thread and changes only within `turn`. Leaves sockets and signals to the service.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

import structlog

from services.scheduler import dispatch, invariants, timing
from services.scheduler.core import Core, Edges
from services.scheduler.handlers import Handlers
from services.scheduler.lifecycle import abort, error
from services.scheduler.worker import Worker
from shared.clock import Clock
from shared.config import SchedulerConfig

log = structlog.get_logger(__name__)

Handler = Callable[[bytes, Any], None]


class Scheduler:
    """Messages come in by `receive`; everything else happens in `turn`, which `run` calls when something is due."""

    def __init__(self, config: SchedulerConfig, epoch: int, edges: Edges, clock: Clock) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self.core = Core(config, epoch, edges, clock, self.post)
        self.handlers = Handlers(self.core)
        self.wake = asyncio.Event()
        self.idle = asyncio.Event()  # set while no request is live
        self.checking = False  # verify all invariants after every turn; for tests
        self._inbox: list[tuple[Handler, bytes, Any]] = []
        self._probes: set[Callable[[], None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._plan_at = math.inf  # when the next step is to be planned that waits for nothing but its time

    def receive(self, handler: Handler, identity: bytes, message: Any) -> None:
        """Queue a message for the next turn; `handler` is one of `handlers.from_x`."""
        self._inbox.append((handler, identity, message))
        self.wake.set()

    def post(self, work: Callable[[], None]) -> None:
        """Have `work` done in the next turn; may be called on any thread once `run` has begun."""
        if self._loop is None:
            self.receive(_do, b"", work)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.receive, _do, b"", work)

    def disconnected(self, probe: Callable[[], None]) -> None:
        """A connection of the edge that `probe` asks about has broken."""
        self._probes.add(probe)
        self.wake.set()

    async def run(self) -> None:
        """Until cancelled. Between two turns nothing runs but timers for what is due."""
        self._loop = asyncio.get_running_loop()
        used = time.thread_time()
        while True:
            await self.wake.wait()
            self.wake.clear()
            try:
                self.turn()
            except Exception:
                self.core.metrics.count("internal_errors")
                log.exception("turn failed")
                if self.checking:
                    raise
            self._set_timer()
            before, used = used, time.thread_time()
            self.core.metrics.loop_cpu.observe(used - before)

    def turn(self) -> None:
        core = self.core
        core.metrics.turns += 1
        self._plan_at = math.inf
        self._handle_inbox()
        core.watch.run()
        core.move_away()
        if not core.operations.paused:
            core.placement.place(core.lifecycle.group_worker)
        core.let_drained_go()
        if not core.operations.paused:
            for worker in core.fleet.with_credit():
                self._run_ahead(worker)
        self._flush()
        if core.board.due_in() <= 0:
            core.frontends.broadcast(core.board.picture())
        if core.kv_events is not None:
            core.kv_events.flush()
        self._after_turn()

    def tick(self) -> None:
        """Once a second: what depends on time alone, and a look at the books when idle."""
        self.core.watch.audit_when_idle()
        self.wake.set()

    def drain(self) -> None:
        """Take no new requests; `idle` is set when the last one has ended."""
        self.core.door.draining = True
        self.core.board.detail = "the server is shutting down"
        self.wake.set()

    def abort_all(self, reason: str, status: int) -> None:
        for request in list(self.core.lifecycle.requests.values()):
            self.core.lifecycle.finish(request, abort(reason, status))
        self.wake.set()

    def _handle_inbox(self) -> None:
        inbox, self._inbox = self._inbox, []
        for handler, identity, message in inbox:
            try:
                handler(identity, message)
            except Exception:
                self.handlers.failed(identity, message)
        probes, self._probes = self._probes, set()
        for probe in probes:
            probe()

    def _flush(self) -> None:
        core = self.core
        for detokenizer in core.outbox.flush():
            core.lose_detokenizer(detokenizer, "connection lost")
            self.wake.set()  # its streams are opened elsewhere in the next turn
        broken, core.outbox.broken = core.outbox.broken, []
        for request in broken:
            core.lifecycle.finish(request, error("internal error"))
            self.wake.set()

    def _run_ahead(self, worker: Worker) -> None:
        """Dispatch steps while the worker has credit and there is something to do."""
        core = self.core
        try:
            if worker.guided:
                core.leading.lead(worker)
                core.masking.prepare(worker)
            while worker.has_credit and worker in core.fleet and not worker.masking:
                if worker.inflight and self._is_early(worker):
                    return
                plan = core.planner.plan(worker)
                if plan is None:
                    return
                if not core.fleet.send(worker, dispatch.build(plan, worker, core.epoch)):
                    return
                dispatch.record(plan, worker, core.seats, core.metrics, core.clock.now())
                core.masking.look(worker)
                used = worker.hello.num_pages - core.seats.available(worker)
                core.metrics.log_step(worker, plan, used / worker.hello.num_pages, len(core.waiting))
        except Exception:
            # Half a plan cannot be sent. Its requests start over elsewhere; one that did it three times ends.
            core.metrics.count("internal_errors")
            log.exception("plan failed", worker=worker.key)
            core.lifecycle.blame(worker)
            core.fleet.drop(worker, "its step could not be planned", blame=False)
            if self.checking:
                raise

    def _is_early(self, worker: Worker) -> bool:
        """Whether the next step is planned later, or once the results of those in flight are there."""
        core, at = self.core, timing.plan_at(worker)
        if at > core.clock.now():
            self._plan_at = min(self._plan_at, at)
            return True
        return core.drafting.holds(worker) or core.leading.holds(worker)

    def _after_turn(self) -> None:
        core = self.core
        if core.lifecycle.num_live:
            self.idle.clear()
        else:
            self.idle.set()
        if self.checking:
            invariants.check(core.tree, core.fleet, core.lifecycle)

    def _set_timer(self) -> None:
        """One timer for whatever is due first; everything else comes as a message."""
        core = self.core
        now = core.clock.now()
        due = min(core.watch.next_deadline(), now + max(core.board.due_in(), 0.01), self._plan_at)
        if self._timer is not None:
            if now < self._timer_at <= due:
                return
            self._timer.cancel()
        self._timer_at = due
        self._timer = asyncio.get_running_loop().call_later(max(due - now, 0.0), self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.wake.set()


def _do(identity: bytes, work: Callable[[], None]) -> None:
    work()
