"""Runs a session's steps in the compute thread and hands results to the event loop; leaves sockets to the worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from services.gpu_worker.activity import Activity
from services.gpu_worker.compute import ComputeThread
from services.gpu_worker.engine import MaskSource, StepStats
from services.gpu_worker.faults import StepAborted
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.pipeline import Pipeline, Reply, SplitEngine, fault_of
from services.gpu_worker.session import Session
from shared.messages.step import StepCommand, StepResult, WorkerFault


class StepEngine(Protocol):
    """What executes steps: an engine alone, or rank 0's with the other ranks behind it."""

    @property
    def stats(self) -> StepStats: ...

    @property
    def kv_cache(self) -> KVCache: ...

    def execute(
        self, command: StepCommand, masks: MaskSource, incarnation: int, queue_ms: float = 0.0
    ) -> StepResult: ...

    def reset(self) -> None: ...


class Executor:
    """`reply` is called in the event loop with each result, and at most one fault, of a session that is still live."""

    def __init__(self, engine: StepEngine, activity: Activity, compute: ComputeThread, reply: Reply) -> None:
        self._engine = engine
        self.activity = activity
        self._compute = compute
        self._reply = reply
        self._pipeline: Pipeline | None = None
        if isinstance(engine, SplitEngine):
            self._pipeline = Pipeline(engine, activity, compute, reply, self._masks_of)

    def close(self) -> None:
        """No step comes any more."""
        if self._pipeline is not None:
            self._pipeline.close()

    def reset(self) -> None:
        """Forget all slots once the step in execution has ended."""
        self._compute.submit(self._reset)

    def submit(self, session: Session, command: StepCommand) -> None:
        """Execute `command` after all earlier ones."""
        received = time.perf_counter()
        if (pipeline := self._pipeline) is not None:
            self._compute.submit(lambda: pipeline.run(session, command, received))
            return
        self._compute.submit(lambda: self._run(session, command, received))

    def _reset(self) -> None:
        if self._pipeline is not None:
            self._pipeline.forget()
        self._engine.reset()
        self.activity.forget()

    def _run(self, session: Session, command: StepCommand, received: float) -> None:
        if not session.is_live:
            return
        self.activity.begin()
        queue_ms = (time.perf_counter() - received) * 1e3
        try:
            message = self._answer(session, command, queue_ms)
        except StepAborted:
            return
        finally:
            self.activity.pause()  # before the answer is out, so that whoever has it sees an idle worker
        self._compute.post(self._reply, session, message)

    def _answer(self, session: Session, command: StepCommand, queue_ms: float) -> StepResult | WorkerFault:
        try:
            result = self._engine.execute(command, self._masks_of(session), session.incarnation, queue_ms)
        except StepAborted:
            raise
        except Exception as error:
            return fault_of(session, command, error)
        session.settle(command.step_id)
        self.activity.finish(command.step_id, self._engine.stats)
        return result

    def _masks_of(self, session: Session) -> Callable[[int], tuple[bytes, bytes]]:
        def take(step_id: int) -> tuple[bytes, bytes]:
            masks = session.take_masks(step_id, on_wait=self.activity.pause)
            self.activity.begin()
            return masks

        return take
