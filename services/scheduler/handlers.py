"""What each message does to the state, edge by edge. Leaves planning to the turn that follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog

from services.scheduler.core import Core
from services.scheduler.lifecycle import abort, error
from services.scheduler.request import Request
from shared.messages.control import Heartbeat, Hello, Ping, Pong
from shared.messages.kv import KvDone, KvInventory, KvReady, KvStored
from shared.messages.request import AbortRequest, GenerateRequest, Operation, RequestRejected, StreamAck
from shared.messages.step import StepResult, WorkerDrain, WorkerFault, WorkerHello
from shared.messages.stream import Finish, FinishReason, StopMatched

log = structlog.get_logger(__name__)

Handler = Callable[[bytes, Any], None]

TOO_LARGE_ALONE = "the request does not fit into the memory of its worker, not even alone"


class Handlers:
    """`from_x(identity, message)` for each edge; `failed` where one of them has raised."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._sequence = 0
        self._tokenizer_table: dict[type, Handler] = {
            Heartbeat: core.frontends.heartbeat,
            GenerateRequest: self._generate,
            AbortRequest: self._abort,
            StreamAck: self._acknowledge,
            Operation: self._operate,
        }
        self._detokenizer_table: dict[type, Handler] = {
            Hello: lambda who, m: core.outbox.hello(who, m, core.lifecycle.requests.values()),
            Heartbeat: core.outbox.heartbeat,
            StopMatched: self._stop_matched,
        }
        self._worker_table: dict[type, Handler] = {
            WorkerHello: core.fleet.hello,
            Heartbeat: core.fleet.heartbeat,
            StepResult: self._step_result,
            WorkerFault: self._worker_fault,
            KvReady: self._kv_ready,
            KvDone: self._kv_done,
            KvStored: self._kv_stored,
            KvInventory: self._kv_inventory,
            WorkerDrain: self._worker_drain,
        }

    def from_tokenizer(self, identity: bytes, message: Any) -> None:
        if isinstance(message, Ping):
            self._core.frontends.send(identity, self._pong(message))
            return
        tokenizer = self._core.frontends.heard(identity)
        if tokenizer is None:
            return
        if not tokenizer.greeted or isinstance(message, Hello):
            tokenizer.greeted = True
            self._core.frontends.send(identity, self._core.board.build())
        self._run(self._tokenizer_table, identity, message)

    def from_detokenizer(self, identity: bytes, message: Any) -> None:
        if isinstance(message, Ping):
            self._core.outbox.send_to(identity, self._pong(message))
            return
        detokenizer = self._core.outbox.detokenizers.get(identity)
        if detokenizer is not None:
            detokenizer.last_heard = self._core.clock.now()
        self._run(self._detokenizer_table, identity, message)

    def from_worker(self, identity: bytes, message: Any) -> None:
        if isinstance(message, Ping):
            self._core.fleet.answer(identity, self._pong(message))
            return
        self._run(self._worker_table, identity, message)

    def _run(self, table: dict[type, Handler], identity: bytes, message: Any) -> None:
        handler = table.get(type(message))
        if handler is not None:  # else a Pong: being heard is all it is for
            handler(identity, message)

    def failed(self, identity: bytes, message: Any) -> None:
        """Handling a message has raised: whoever it was about must not wait for ever."""
        core = self._core
        core.metrics.count("internal_errors")
        log.exception("message failed", kind=type(message).__name__, sender=repr(identity))
        if isinstance(message, GenerateRequest):
            request = core.lifecycle.requests.get(message.request_id)
            if request is not None and request.live:
                core.lifecycle.finish(request, error("internal error"))
            else:
                core.frontends.send(identity, RequestRejected(message.request_id, "internal", "internal error"))

    def _pong(self, ping: Ping) -> Pong:
        return Pong(ping.nonce, healthy=True, detail=self._core.board.not_ready)

    # Tokenizers

    def _generate(self, identity: bytes, message: GenerateRequest) -> None:
        core = self._core
        if message.epoch not in (0, core.epoch):
            log.debug("request of another epoch dropped", request_id=message.request_id, epoch=message.epoch)
            return
        refusal = core.door.refuse(message) or core.tenants.refuse(message)
        if refusal is not None:
            core.metrics.count("requests_rejected")
            core.frontends.send(identity, refusal)
            return
        earlier = core.lifecycle.requests.get(message.request_id)
        if earlier is not None and earlier.frontend == identity and message.output_ids:
            core.outbox.reopen(earlier)  # it has ended, and its frontend has missed that
            return
        if earlier is not None:
            core.forget(earlier)
        self._sequence += 1
        request = Request(message, identity, core.clock.now(), self._sequence)
        core.metrics.count("requests")
        core.enter(request)
        core.watch.add_deadline(request)
        if message.constraint is not None:
            core.compiling.take(request)
            return
        core.lifecycle.accept(request)
        if request.output:
            core.resume(request)

    def _abort(self, identity: bytes, message: AbortRequest) -> None:
        for request_id in message.request_ids:
            request = self._core.lifecycle.requests.get(request_id)
            if request is not None:
                self._core.lifecycle.finish(request, abort(message.reason))
        for name in message.names:
            for request in self._core.names.find(name, message.tenant):
                self._core.lifecycle.finish(request, abort(message.reason))

    def _acknowledge(self, identity: bytes, message: StreamAck) -> None:
        for request_id in message.request_ids:
            request = self._core.lifecycle.requests.get(request_id)
            if request is not None and not request.live and request.frontend == identity:
                self._core.forget(request)

    def _operate(self, identity: bytes, message: Operation) -> None:
        self._core.frontends.send(identity, self._core.operations.run(message))

    # Detokenizers

    def _stop_matched(self, identity: bytes, message: StopMatched) -> None:
        """The client has its last chunk already: nothing more is sent for it."""
        request = self._core.lifecycle.requests.get(message.request_id)
        if request is None or not request.live or message.epoch not in (0, self._core.epoch):
            return
        if request.detokenizer is None or request.detokenizer.identity != identity:
            return  # one that was given up; the stream was opened elsewhere and will match there
        request.told = True
        self._core.lifecycle.finish(request, Finish(FinishReason.STOP, matched_string=message.matched))
        del request.output[message.num_output_tokens :]

    # Workers

    def _step_result(self, identity: bytes, message: StepResult) -> None:
        core = self._core
        worker = core.fleet.known(identity, message.incarnation)
        if worker is None:
            return
        step = core.fleet.take_result(worker, message)
        if step is None:
            return
        core.migration.rates.computed(worker, step, message.forward_ms)
        core.drafting.measured(worker, step, message)
        if core.kv_events is not None:
            core.kv_events.step_done(worker.key, step.step_id)
        try:
            core.settler.settle(worker, step, message)
            core.migration.stepped(worker)
            core.masking.look(worker)
        except Exception:
            core.metrics.count("internal_errors")
            log.exception("result could not be settled", worker=worker.key, step_id=step.step_id)
            core.fleet.drop(worker, "its result could not be settled")
            core.lifecycle.abandon(step)

    def _kv_ready(self, identity: bytes, message: KvReady) -> None:
        worker = self._core.fleet.known(identity, message.incarnation)
        if worker is not None:
            self._core.migration.ready(worker, message)

    def _kv_done(self, identity: bytes, message: KvDone) -> None:
        worker = self._core.fleet.known(identity, message.incarnation)
        if worker is not None:
            self._core.migration.done(worker, message)

    def _kv_stored(self, identity: bytes, message: KvStored) -> None:
        worker = self._core.fleet.known(identity, message.incarnation)
        if worker is not None:
            self._core.tiers.stored(worker, message)

    def _kv_inventory(self, identity: bytes, message: KvInventory) -> None:
        worker = self._core.fleet.known(identity, message.incarnation)
        if worker is not None:
            self._core.tiers.inventory(worker, message)

    def _worker_fault(self, identity: bytes, message: WorkerFault) -> None:
        worker = self._core.fleet.known(identity, message.incarnation)
        if worker is None:
            return
        reason = f"{message.kind} fault in step {message.step_id}: {message.detail}"
        if message.kind != "oom":
            self._core.fleet.drop(worker, reason)
            return
        step = next((step for step in worker.inflight if step.step_id == message.step_id), None)
        rows = list(dict.fromkeys(step.rows())) if step is not None else []
        self._core.fleet.drop(worker, reason, blame=message.remedy != "smaller")
        if message.remedy == "smaller":
            self._core.metrics.count("workers_lost")  # though nobody is to blame
        elif message.remedy == "none" and len(rows) == 1:
            self._core.lifecycle.finish(rows[0], error(TOO_LARGE_ALONE))

    def _worker_drain(self, identity: bytes, message: WorkerDrain) -> None:
        worker = self._core.fleet.known(identity, message.incarnation)
        if worker is not None:
            self._core.drain_worker(worker, message.deadline_s)
