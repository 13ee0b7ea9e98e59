"""Runs steps in two halves: the next one is launched as soon as it is there, a result goes out once it is known.

The compute thread launches and completes; a thread beside it does nothing but wait for the device, so that a command
which comes meanwhile is launched at once. Leaves what a step is to the engine.

compute   launch 0 | launch 1 |        complete 0 -> result | launch 2 |     complete 1 -> result
waiter    ..... waits for 0 ..........|..... waits for 1 ..................|
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import structlog

from services.gpu_worker.activity import Activity
from services.gpu_worker.compute import ComputeThread
from services.gpu_worker.engine import MaskSource, StepStats
from services.gpu_worker.faults import StepAborted, classify
from services.gpu_worker.session import Session
from shared.messages.step import StepCommand, StepResult, WorkerFault

log = structlog.get_logger(__name__)

Reply = Callable[[Session, StepResult | WorkerFault], None]

DEPTH = 2  # steps that are launched and not complete


class LaunchedStep(Protocol):
    """The first half of a step, under way."""

    @property
    def deferred(self) -> bool:
        """Whether it wants to be completed at once, in the compute thread, after those before it."""
        ...

    def wait(self) -> None:
        """Hold the calling thread, which may be any, until the device has done it. Raises what went wrong on it."""
        ...


@runtime_checkable
class SplitEngine(Protocol):
    """An engine whose steps have two halves."""

    @property
    def stats(self) -> StepStats: ...

    def must_complete_before(self, command: StepCommand) -> bool:
        """Whether `command` may only be launched once all steps under way are complete. Raises ProtocolError."""
        ...

    def launch(self, command: StepCommand) -> LaunchedStep:
        """Enqueue the step's work. Raises ProtocolError and whatever the model raises."""
        ...

    def complete(self, step: LaunchedStep, masks: MaskSource, incarnation: int, queue_ms: float = 0.0) -> StepResult:
        """Answer the oldest step under way. Raises as Engine.execute."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A step under way and who has asked for it."""

    session: Session
    command: StepCommand
    step: LaunchedStep
    queue_ms: float


class Pipeline:
    """All but the constructor and `close` belongs to the compute thread."""

    def __init__(
        self,
        engine: SplitEngine,
        activity: Activity,
        compute: ComputeThread,
        reply: Reply,
        masks_of: Callable[[Session], MaskSource],
    ) -> None:
        self._engine = engine
        self._activity = activity
        self._compute = compute
        self._reply = reply
        self._masks_of = masks_of
        self._flights: deque[_Flight] = deque()
        self._watched: queue.SimpleQueue[_Flight | None] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="device-waiter", daemon=True).start()

    def run(self, session: Session, command: StepCommand, received: float) -> None:
        """Launch `command`; what is under way is completed first only where it must be."""
        if not session.is_live:
            return
        try:
            flight = self._launch(session, command, received)
        except Exception as error:
            self._drain()  # those before it have their results, or the fault is theirs
            self._fail(session, command, error)
            return
        if flight is None:
            return
        self._flights.append(flight)
        if flight.step.deferred:
            self._drain()
        else:
            self._watched.put(flight)

    def _launch(self, session: Session, command: StepCommand, received: float) -> _Flight | None:
        """None where a step before it has failed."""
        while len(self._flights) >= DEPTH or (self._flights and self._engine.must_complete_before(command)):
            self._complete()
        if not session.is_live:
            return None
        self._activity.begin()
        queue_ms = (time.perf_counter() - received) * 1e3
        return _Flight(session, command, self._engine.launch(command), queue_ms)

    def forget(self) -> None:
        """What is under way has no result any more."""
        self._flights.clear()
        self._activity.pause()

    def close(self) -> None:
        """Let the waiting thread end."""
        self._watched.put(None)

    def _watch(self) -> None:
        while (flight := self._watched.get()) is not None:
            try:
                flight.step.wait()
            except Exception as error:
                # Told here only; whoever completes the step meets it again, and answers with a fault.
                log.warning("a step failed on the device", step_id=flight.command.step_id, detail=str(error))
            self._compute.submit(partial(self._complete_to, flight))

    def _complete_to(self, flight: _Flight) -> None:
        while flight in self._flights:
            self._complete()

    def _drain(self) -> None:
        while self._flights:
            self._complete()

    def _complete(self) -> None:
        flight = self._flights.popleft()
        session, command = flight.session, flight.command
        if not session.is_live:
            self._activity.pause()  # a reset is on its way
            return
        try:
            result = self._engine.complete(flight.step, self._masks_of(session), session.incarnation, flight.queue_ms)
        except StepAborted:
            self._activity.pause()
            return
        except Exception as error:
            self._fail(session, command, error)
            return
        session.settle(command.step_id)
        self._activity.finish(command.step_id, self._engine.stats)
        self._activity.pause()  # before the answer is out, so that whoever has it sees an idle worker
        if self._flights:
            self._activity.begin()
        self._compute.post(self._reply, session, result)

    def _fail(self, session: Session, command: StepCommand, error: Exception) -> None:
        self._activity.pause()
        if session.is_live:
            self._compute.post(self._reply, session, fault_of(session, command, error))


def fault_of(session: Session, command: StepCommand, error: Exception) -> WorkerFault:
    """The fault a step has ended with; nothing of its session is executed any more."""
    session.end()
    log.exception("step failed", step_id=command.step_id, epoch=command.epoch)
    return WorkerFault(session.incarnation, command.step_id, classify(error), f"{type(error).__name__}: {error}")
