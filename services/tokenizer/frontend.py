"""The door's sockets: one to the scheduler, one to every detokenizer the scheduler names.

Submits, aborts, acknowledges; resubmits what lives when the scheduler begins a new epoch. Leaves HTTP to the
routes and merging to streams.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable

import structlog

from services.tokenizer import calls
from services.tokenizer.errors import ApiError, from_rejection, unavailable
from services.tokenizer.limits import Limits
from services.tokenizer.links import DetokenizerLinks
from services.tokenizer.metrics import Measurements
from services.tokenizer.streams import Group, StreamTable
from shared.clock import Clock
from shared.messages.control import Heartbeat, Hello, Ping, Pong
from shared.messages.edges import ToTokenizer
from shared.messages.request import (
    AbortRequest,
    Operation,
    OperationDone,
    OperationName,
    RequestRejected,
    StreamAck,
    SystemStatus,
)
from shared.messages.stream import TextChunks
from shared.transport import Client, PeerBusy

log = structlog.get_logger(__name__)

STATUS_TIMEOUT_S = 3.0
PEER_GRACE_S = 30.0  # how long live requests wait for a scheduler or detokenizer that is away
OPERATION_TIMEOUT_S = 10.0
HELLO_TRIES = 20


class Frontend:
    """One life of this service towards scheduler and detokenizers."""

    def __init__(
        self, scheduler: str, service_id: str, incarnation: int, clock: Clock, measurements: Measurements
    ) -> None:
        self.service_id = service_id
        self.incarnation = incarnation
        self.frontend_id = f"{service_id}/{incarnation}"
        self.streams = StreamTable()
        self.status: SystemStatus | None = None
        self.draining = False
        self.grace = 0.0  # seconds live requests wait for a service that is away; 0: PEER_GRACE_S
        self.measurements = measurements
        self.limits = Limits(clock)
        self.on_ready: Callable[[], None] = _nothing  # whenever a message finds us ready
        self.on_idle: Callable[[], None] = _nothing  # when the last request has gone
        self._clock = clock
        self._heard_at = -math.inf
        self._lost_at: float | None = None  # when scheduler or detokenizer was first missed
        self._resubmit = False
        self._nonces = itertools.count(1)
        self._operations: dict[int, asyncio.Future[OperationDone]] = {}
        self._acks: list[str] = []
        self._aborts: list[str] = []
        self._loop = asyncio.get_running_loop()
        hello = Hello("tokenizer", service_id, incarnation)
        self._hello = hello
        self._links = DetokenizerLinks(self.frontend_id, hello, self._on_text, self._look_ready, clock)
        self._scheduler: Client[ToTokenizer] = Client(scheduler, self.frontend_id, ToTokenizer, self._on_message)
        self._hello_tries = HELLO_TRIES
        self._scheduler.on_writable = self._on_writable
        self._scheduler.watch(self._on_disconnect)
        self._scheduler.try_send(hello)

    # What the routes ask

    @property
    def fresh(self) -> bool:
        """Whether the scheduler was heard within the last three seconds."""
        return self._clock.now() - self._heard_at < STATUS_TIMEOUT_S

    def why_not_ready(self) -> str:
        """Empty where a request would run now."""
        if self.draining:
            return "The server is shutting down."
        if self.status is None or not self.fresh:
            return "The scheduler is not reachable."
        if not self.status.ready:
            return self.status.detail or "No worker is ready."
        return "" if self._links.ready else "No detokenizer is connected."

    def refuse_unless_alive(self) -> None:
        """Raises ApiError (503) while nothing is heard of the scheduler."""
        if not self.fresh:
            raise unavailable("The scheduler is not reachable.")

    def refuse_unless_ready(self) -> None:
        reason = self.why_not_ready()
        if reason:
            raise unavailable(reason, (self.status.retry_after_s if self.status else 0) or 1.0)

    def submit(self, group: Group) -> None:
        """Send every choice. Raises ApiError; then nothing of it runs."""
        self.refuse_unless_ready()
        self._send(group)

    def follow(self, ended: Group, group: Group) -> None:
        """Send what goes on where another group has ended: one piece of work, even while the server drains."""
        self.streams.discard(ended)
        self._send(group)

    def _send(self, group: Group) -> None:
        call = calls.current()
        for stream in group.streams:
            stream.belong(call)
        self.streams.add(group)
        try:
            for stream in group.streams:
                self._scheduler.send(stream.stamp(self.frontend_id, self.status.epoch if self.status else 0))
        except PeerBusy:
            self.close(group)
            raise unavailable("The scheduler is not reachable.") from None

    def close(self, group: Group) -> None:
        """Forget a group; what was sent and has not ended is aborted. Harmless a second time."""
        unfinished = [stream.request.request_id for stream in self.streams.discard(group) if not stream.settled]
        if unfinished:
            self._queue(self._aborts, unfinished)
        if not len(self.streams):
            self.on_idle()

    def abort(self, name: str) -> None:
        """End the caller's requests of this name, whichever frontend they came through; their answers say so.

        An operator means anybody's. Raises ApiError where the scheduler is away.
        """
        call = calls.current()
        tenant = "" if call.is_operator else call.tenant
        self.streams.give_up(name, tenant)
        try:
            self._scheduler.send(AbortRequest((), names=(name,), tenant=tenant))
        except PeerBusy:
            raise unavailable("The scheduler is not reachable.") from None

    async def operate(self, name: OperationName, argument: str = "") -> OperationDone:
        """Run one operator's command. Raises ApiError where the scheduler is away."""
        nonce = next(self._nonces)
        future: asyncio.Future[OperationDone] = self._loop.create_future()
        self._operations[nonce] = future
        try:
            self._scheduler.send(Operation(nonce, name, argument, calls.current().tenant))
            async with asyncio.timeout(OPERATION_TIMEOUT_S):
                return await future
        except (PeerBusy, TimeoutError):
            raise unavailable("The scheduler does not answer.") from None
        finally:
            del self._operations[nonce]

    # Life

    def heartbeat(self) -> None:
        """Once a second."""
        self._scheduler.try_send(self._beat() if self.fresh else self._hello)
        self._links.heartbeat()
        if self.fresh and self._links.connected:
            self._lost_at = None
            return
        now = self._clock.now()
        self._lost_at = now if self._lost_at is None else self._lost_at
        if now - self._lost_at > (self.grace or PEER_GRACE_S):
            missed = "detokenizer" if self.fresh else "scheduler"
            self.fail_all(unavailable(f"The {missed} is away for too long."))

    def _beat(self) -> Heartbeat:
        gauges = {**self.measurements.gauges(), "streams": float(len(self.streams))}
        gauges["malformed_total"] = float(self._scheduler.malformed)
        return Heartbeat(self.service_id, self.incarnation, gauges=gauges, histograms=self.measurements.snapshots())

    def fail_all(self, error: ApiError) -> None:
        """End every live stream; the scheduler is told when their readers have gone."""
        for stream in self.streams.live():
            stream.fail(error)

    def shut(self) -> None:
        self._flush()
        self._links.close()
        self._scheduler.close()

    # What the sockets say

    def _on_message(self, message: ToTokenizer, frames: list[bytes]) -> None:
        match message:
            case SystemStatus():
                self._on_system_status(message)
            case RequestRejected():
                self._on_rejected(message)
            case OperationDone():
                future = self._operations.get(message.nonce)
                if future is not None and not future.done():
                    future.set_result(message)
            case Ping():
                self._scheduler.try_send(Pong(message.nonce))
            case Pong():
                pass

    def _on_disconnect(self) -> None:
        if self.fresh:
            log.warning("scheduler lost", live_streams=len(self.streams.live()))
        self._heard_at = -math.inf
        self._resubmit = True
        self._hello_tries = HELLO_TRIES
        self._scheduler.try_send(self._hello)

    def _on_writable(self) -> None:
        """A send met a connection that is not there yet: a few quick tries, then one with every heartbeat."""
        if not self.fresh and self._hello_tries > 0:
            self._hello_tries -= 1
            self._scheduler.try_send(self._hello)
        self._flush()

    def _on_system_status(self, status: SystemStatus) -> None:
        old = self.status
        if old is not None and status.epoch < old.epoch:
            return
        self.status = status
        self._heard_at = self._clock.now()
        self._links.follow(status.detokenizers)
        if self._resubmit or (old is not None and status.epoch > old.epoch):
            self._resubmit = False
            self._resubmit_all(status.epoch)
        self._look_ready()

    def _look_ready(self) -> None:
        if not self.why_not_ready():
            self.on_ready()

    def _resubmit_all(self, epoch: int) -> None:
        """A scheduler that began anew knows nobody; one that was only cut off drops what it still knows."""
        live = self.streams.live()
        log.info("scheduler is back", epoch=epoch, resubmitted=len(live))
        for stream in live:
            try:
                self._scheduler.send(stream.resumed(epoch))
            except PeerBusy:
                self._resubmit = True  # again with the next status; duplicates are dropped there
                return

    def _on_rejected(self, message: RequestRejected) -> None:
        stream = self.streams.get(message.request_id)
        if stream is None or stream.done:
            return
        if message.code == "duplicate_id" and stream.resubmitted:
            return
        if message.code == "rate_limited":
            self.limits.block(stream.request.tenant, message.retry_after_s, message.detail)
        stream.settled = True
        stream.fail(from_rejection(message))

    def _on_text(self, message: TextChunks) -> None:
        if self.status is None or message.epoch < self.status.epoch:
            return
        for chunk in message.chunks:
            stream = self.streams.get(chunk.request_id)
            if stream is not None:
                stream.accept(chunk)
            if chunk.finish is not None:
                self._queue(self._acks, (chunk.request_id,))

    def _queue(self, queue: list[str], request_ids: tuple[str, ...] | list[str]) -> None:
        if not self._acks and not self._aborts and request_ids:
            self._loop.call_soon(self._flush)
        queue.extend(request_ids)

    def _flush(self) -> None:
        """Send what has gathered in this turn of the event loop; what cannot leave now stays."""
        for queue, kind in ((self._aborts, AbortRequest), (self._acks, StreamAck)):
            if queue:
                try:
                    self._scheduler.send(kind(tuple(queue)))
                except PeerBusy:
                    return
                queue.clear()


def _nothing() -> None:
    """For listeners nobody has set."""
