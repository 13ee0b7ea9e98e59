"""The worker's I/O loop: one socket to the scheduler, hellos, heartbeats, draining. Leaves executing to `executor`.

hello (back-off) -> welcome -> steps ... -> reset or disconnect -> new incarnation, new identity -> hello
                                  \\-> fault: nothing is executed until the reset
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import msgspec
import structlog

from services.gpu_worker.activity import Activity
from services.gpu_worker.compute import ComputeThread
from services.gpu_worker.executor import Executor
from services.gpu_worker.faults import ProtocolError
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.memory import MemoryPlanError, release_cached, resident_bytes
from services.gpu_worker.models.config import ModelError
from services.gpu_worker.session import Session
from services.gpu_worker.startup import StartedEngine, start_engine
from services.gpu_worker.step_size import StepSize, StepSizes
from services.gpu_worker.transfer.moves import PageMoves, open_ways
from services.gpu_worker.transfer.nixl_api import NixlMissing
from shared.config import WorkerConfig
from shared.messages.control import Heartbeat, Ping, Pong
from shared.messages.edges import KvOrder, ToWorker
from shared.messages.kv import KvCancel, KvLoad, KvReceive, KvSend, KvStore
from shared.messages.step import (
    Drain,
    StepCommand,
    StepResult,
    TokenMasks,
    WorkerDrain,
    WorkerFault,
    WorkerReset,
    WorkerWelcome,
)
from shared.service import CannotStart, announce_ready, new_incarnation, new_service_id
from shared.transport import Client, Frames, PeerBusy

log = structlog.get_logger(__name__)

FIRST_HELLO_S = 0.05
SLOWEST_HELLO_S = 1.0
STOP_TIMEOUT_S = 2.0


class Worker:
    """One process with one model. `exit_code` is what the process should end with.

    `end_process` is how it ends itself: as everybody else would end it, by a signal. Once `device_lost`, nothing may
    be asked of the device any more, not even to free what it holds.
    """

    def __init__(
        self,
        config: WorkerConfig,
        start: Callable[[WorkerConfig], StartedEngine] = start_engine,
        end_process: Callable[[], None] = lambda: signal.raise_signal(signal.SIGTERM),
        settle_down: Callable[[WorkerConfig, KVCache], object] = lambda _config, _cache: None,
    ) -> None:
        """`settle_down`: called in the compute thread once everything that starts threads from there has done so."""
        self._config = config
        self._start_engine = start
        self._settle_down = settle_down
        self._end_process = end_process
        self._worker_id = new_service_id("worker", config)
        self._incarnation = 0
        self._compute: ComputeThread | None = None
        self._loading = False
        self._session: Session | None = None
        self._pages: PageMoves | None = None
        self._client: Client[ToWorker] | None = None
        self._hello_timer: asyncio.TimerHandle | None = None
        self._drained = asyncio.Event()
        self._draining = False
        self._frees_memory = False
        self._held_orders: list[KvOrder] | None = None  # None: no step of a former life is left
        self.device_lost = False
        self.exit_code = 0

    async def start(self) -> None:
        """Load the model, then introduce ourselves; commands come once the scheduler welcomes us."""
        self._loop = asyncio.get_running_loop()
        self._compute = ComputeThread()
        self._loading = True
        try:
            started = await self._compute.call(lambda: self._start_engine(self._config))
            ways = await self._compute.call(lambda: open_ways(self._config, self._worker_id, started))
            await self._compute.call(lambda: self._settle_down(self._config, started.engine.kv_cache))
        except (ModelError, MemoryPlanError, NixlMissing) as error:
            raise CannotStart(str(error)) from error
        self._loading = False
        self._executor = Executor(started.engine, Activity(), self._compute, self._reply)
        self._pages = PageMoves(self._config, ways, started, self._compute, self._send)
        self._hello = self._pages.complete(started.hello)
        self._sizes = StepSizes(StepSize(started.hello.max_batched_tokens, started.hello.max_slots))
        self._gauges = started.gauges
        self._connect()

    async def drain(self) -> None:
        """Ask the scheduler to move our requests away; execute until it says Drain or the time-out."""
        self._draining = True
        if self._session is None or self._drained.is_set():
            return
        if not self._send(WorkerDrain(self._incarnation, self._config.drain_timeout)):
            return
        self.heartbeat()
        try:
            await asyncio.wait_for(self._drained.wait(), self._config.drain_timeout)
        except TimeoutError:
            log.warning("not drained in time", seconds=self._config.drain_timeout)

    async def close(self) -> None:
        """Give up what runs, close the socket, end the compute thread if it can end."""
        self._end_session()
        self._disconnect()
        if self._pages is not None:
            self._pages.close()
            self._executor.close()
        if self._compute is not None:
            await self._compute.stop(0.0 if self._loading else STOP_TIMEOUT_S)

    @property
    def is_computing(self) -> bool:
        """Whether the compute thread still runs: then only the end of the process ends it."""
        return self._compute is not None and self._compute.is_alive

    def heartbeat(self) -> None:
        """Called once a second; a worker that is not welcome has its hellos instead."""
        if self._session is None or self._client is None:
            return
        activity = self._executor.activity
        gauges = {**self._gauges, **activity.gauges()}
        gauges["memory_bytes"] = float(resident_bytes())
        gauges["draining"] = float(self._draining)
        gauges["malformed_total"] = float(self._client.malformed)
        if self._pages is not None:
            gauges.update(self._pages.gauges())
        self._client.try_send(
            Heartbeat(
                service_id=self._worker_id,
                incarnation=self._incarnation,
                last_step_id=activity.last_step,
                step_age_ms=activity.step_age_ms(),
                gauges=gauges,
                histograms=activity.histograms(),
            )
        )

    def _connect(self) -> None:
        self._incarnation = max(new_incarnation(), self._incarnation + 1)
        identity = f"{self._worker_id}/{self._incarnation}"
        client: Client[ToWorker] = Client(self._config.scheduler, identity, ToWorker, self._on_message)

        def on_disconnect() -> None:
            # Closing a socket inside its own monitor's callback would pull it away under that callback.
            self._loop.call_soon(self._on_disconnect, client)

        client.watch(on_disconnect)
        self._client = client
        self._say_hello(FIRST_HELLO_S)

    def _disconnect(self) -> None:
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        if self._client is not None:
            self._client.close()
            self._client = None

    def _say_hello(self, delay: float) -> None:
        if self._client is None or self._session is not None:
            return
        hello = msgspec.structs.replace(
            self._hello,
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            max_batched_tokens=self._sizes.now.tokens,
            max_slots=self._sizes.now.slots,
        )
        self._client.try_send(hello)
        self._hello_timer = self._loop.call_later(delay, self._say_hello, min(delay * 2, SLOWEST_HELLO_S))

    def _start_over(self, why: str) -> None:
        """Forget everything and come back as a new incarnation (or leave, if that is what we were doing)."""
        log.warning("starting over", reason=why, incarnation=self._incarnation)
        self._end_session()
        self._disconnect()
        if self.device_lost:
            self._leave("the device's context is lost", exit_code=1)
        elif self._draining:
            self._drained.set()
        else:
            self._connect()

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.end()
            self._session = None
            self._executor.reset()
            self._hold_orders()
            if self._frees_memory and self._compute is not None:
                self._frees_memory = False
                self._compute.submit(release_cached)  # after the reset, which gives up what steps under way hold
        if self._pages is not None:
            self._pages.end()

    def _hold_orders(self) -> None:
        """A step of the life that ends may still be running and write pages: those of the next one move after it."""
        held = self._held_orders = []
        if (compute := self._compute) is not None:
            compute.submit(lambda: compute.post(self._obey_held, held))

    def _obey_held(self, held: list[KvOrder]) -> None:
        if held is self._held_orders:
            self._held_orders = None
            for order in held:
                self._on_pages(order)

    def _leave(self, why: str, exit_code: int) -> None:
        (log.error if exit_code else log.info)("leaving", reason=why)
        self.exit_code = exit_code
        self._drained.set()
        self._end_process()

    def _on_disconnect(self, client: Client[ToWorker]) -> None:
        if client is self._client:
            self._start_over("the scheduler is gone")

    def _send(self, message: msgspec.Struct) -> bool:
        if self._client is None:
            return False
        try:
            self._client.send(message)
        except PeerBusy:
            self._start_over("the scheduler takes no messages")
            return False
        return True

    def _reply(self, session: Session, message: StepResult | WorkerFault) -> None:
        if session is not self._session or not (session.is_live or isinstance(message, WorkerFault)):
            return
        if isinstance(message, WorkerFault):
            self.device_lost = message.kind in ("cuda", "nccl")
            if message.kind == "oom":
                message = self._shrink(session, message)
        self._send(message)

    def _shrink(self, session: Session, fault: WorkerFault) -> WorkerFault:
        """Offer smaller steps from the next hello on, and free what can be freed before it."""
        tokens, rows = session.size_of(fault.step_id)
        shrinks = self._sizes.after_fault(tokens, rows, self._executor.activity.steps)
        size = self._sizes.now
        sizes = {"step_tokens": tokens, "step_rows": rows, "next_tokens": size.tokens, "next_slots": size.slots}
        log.warning("out of memory in a step", **sizes)
        self._frees_memory = True
        return msgspec.structs.replace(fault, remedy="smaller" if shrinks else "none")

    def _fault(self, step_id: int, error: ProtocolError) -> None:
        session = self._session
        if session is not None and session.is_live:
            log.error("protocol violated", step_id=step_id, detail=str(error))
            session.end()
            self._send(WorkerFault(self._incarnation, step_id, "protocol", str(error)))

    def _on_message(self, message: ToWorker, frames: Frames) -> None:
        match message:
            case StepCommand():
                self._on_command(message)
            case TokenMasks():
                self._on_masks(message, frames)
            case WorkerWelcome():
                self._on_welcome(message)
            case WorkerReset():
                self._on_reset(message)
            case Drain():
                self._on_drain()
            case Ping(nonce=nonce):
                self._send(Pong(nonce, healthy=self._session is not None and self._session.is_live))
            case KvSend() | KvReceive() | KvCancel() | KvStore() | KvLoad():
                self._on_pages(message)
            case _:
                log.debug("nothing to do", message=type(message).__name__)

    def _on_pages(self, message: KvOrder) -> None:
        if self._pages is None or self._session is None or not self._session.is_live:
            return
        if self._held_orders is not None:
            self._held_orders.append(message)
            return
        try:
            self._pages.handle(message)
        except ValueError as error:
            self._fault(self._executor.activity.last_step, ProtocolError(f"{type(message).__name__}: {error}"))

    def _on_command(self, command: StepCommand) -> None:
        session = self._session
        if session is None or not session.is_live:
            return
        try:
            session.admit(command)
        except ProtocolError as error:
            self._fault(command.step_id, error)
            return
        self._executor.submit(session, command)

    def _on_masks(self, masks: TokenMasks, frames: Frames) -> None:
        session = self._session
        if session is None or not session.is_live:
            return
        try:
            session.put_masks(masks, frames[0] if frames else b"")
        except ProtocolError as error:
            self._fault(masks.step_id, error)

    def _on_welcome(self, welcome: WorkerWelcome) -> None:
        if self._session is not None and self._session.epoch == welcome.epoch:
            return  # the answer to a hello that was repeated
        self._end_session()
        self._session = Session(self._incarnation, welcome.epoch, self._config.max_inflight_steps)
        if self._pages is not None:
            self._pages.begin(self._incarnation)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        log.info("welcome", epoch=welcome.epoch, incarnation=self._incarnation)
        announce_ready()

    def _on_reset(self, reset: WorkerReset) -> None:
        if reset.fatal:
            self._leave(reset.reason, exit_code=1)
        else:
            self._start_over(reset.reason)

    def _on_drain(self) -> None:
        self._drained.set()
        if not self._draining:
            self._leave("drained by the scheduler", exit_code=0)
