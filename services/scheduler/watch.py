"""What happens because time passes: silence, deadlines, grace times, idle checks. Leaves the clockwork to the loop."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import structlog

from services.scheduler import invariants
from services.scheduler.lifecycle import abort, error
from services.scheduler.request import Request

if TYPE_CHECKING:
    from services.scheduler.core import Core

log = structlog.get_logger(__name__)

INTERVAL_S = 0.5
STALL_S = 2.5
"""After a pause this long of our own, everybody else looks silent: their messages are still in the sockets."""
RETENTION_S = 60.0
"""A final chunk nobody acknowledges is forgotten after this time."""
AUDIT_SLICE_S = 0.002


class Watch:
    def __init__(self, core: Core) -> None:
        self._core = core
        self._config = core.config
        self._clock = core.clock
        self._fleet = core.fleet
        self._lifecycle = core.lifecycle
        self._deadlines: list[tuple[float, int, str]] = []  # time, the request's sequence number, its id
        self._last = core.clock.now()
        self._sampled = core.clock.now()
        self._audit: Iterator[None] | None = None
        self._audited = -1  # the turn that was audited

    def add_deadline(self, request: Request) -> None:
        if request.deadline:
            heapq.heappush(self._deadlines, (request.deadline, request.sequence, request.request_id))

    def next_deadline(self) -> float:
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def run(self) -> None:
        """Called in every turn; does something about twice a second."""
        now = self._clock.now()
        if self.next_deadline() <= now:
            self._end_overdue(now)
        if now - self._last < INTERVAL_S:
            return
        stalled = now - self._last > STALL_S
        self._last = now
        if not stalled:
            self._fleet.check_silence()
            self._core.frontends.check_silence()
            self._check_detokenizers(now)
            self._core.migration.check_deadlines()
        for worker in self._fleet:
            self._core.metrics.log_prefills(worker)
        self._core.pins.expire()
        self._end_hopeless(now)
        self._forget_unacknowledged(now)
        if now - self._sampled >= 1.0:
            self._sampled = now
            self._core.metrics.sample()

    def _end_overdue(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, sequence, request_id = heapq.heappop(self._deadlines)
            request = self._lifecycle.requests.get(request_id)
            if request is not None and request.sequence == sequence:
                if request.admitted:
                    self._lifecycle.finish(request, abort("The request timed out while it was running.", 408))
                else:
                    self._lifecycle.finish(request, abort("The request timed out while it was waiting.", 504))

    def _check_detokenizers(self, now: float) -> None:
        for detokenizer in list(self._core.outbox.detokenizers.values()):
            silence = now - detokenizer.last_heard
            if silence > self._config.heartbeat_timeout:
                self._core.lose_detokenizer(detokenizer, f"silent for {silence:.1f} s")

    def _end_hopeless(self, now: float) -> None:
        """Requests that no worker can take, and none that could has come for the grace time."""
        if now - self._fleet.changed_at <= self._config.worker_grace:
            return
        limit = self._fleet.max_request_tokens
        for request in [r for r in self._lifecycle.waiting if r.total_tokens > limit]:
            if now - request.arrival <= self._config.worker_grace:
                continue
            if limit:
                text = f"prompt and output would have {request.total_tokens} tokens, the limit is {limit}"
                self._lifecycle.finish(request, error(text, 400))
            else:
                self._lifecycle.finish(request, error("no worker is connected", 503))

    def _forget_unacknowledged(self, now: float) -> None:
        known = self._core.frontends.tokenizers
        for request in list(self._lifecycle.finished.values()):
            abandoned = request.frontend not in known and (request.told or not request.opened)
            if abandoned or now - request.finished_at > RETENTION_S:
                self._core.forget(request)

    def audit_when_idle(self) -> None:
        """Once per idle time, in slices: a mismatch is loud, never fatal."""
        if self._lifecycle.num_live or self._core.metrics.counters["steps"] == self._audited:
            self._audit = None
            return
        if self._audit is None:
            self._audit = self._core.tree.audit()
        until = time.monotonic() + AUDIT_SLICE_S
        try:
            for _ in self._audit:
                if time.monotonic() > until:
                    return
            invariants.check_books(self._core.tree, self._fleet, self._lifecycle)
        except AssertionError as mismatch:
            self._core.metrics.count("invariant_violations")
            log.error("invariant violated", what=str(mismatch))
        self._audit = None
        self._audited = self._core.metrics.counters["steps"]
