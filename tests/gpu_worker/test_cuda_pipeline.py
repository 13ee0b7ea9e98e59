"""The executor over an engine in two halves: what is launched when, what a fault leaves, all without a model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from services.gpu_worker.activity import Activity
from services.gpu_worker.compute import ComputeThread
from services.gpu_worker.engine import MaskSource, StepStats
from services.gpu_worker.executor import Executor
from services.gpu_worker.session import Session
from services.gpu_worker.slots import column
from shared.ints import pack
from shared.messages.step import StepCommand, StepResult, TokenMasks, WorkerFault


@dataclass
class FakeStep:
    """A step whose device is as slow as the test wants."""

    command: StepCommand
    deferred: bool
    reached: threading.Event = field(default_factory=threading.Event)

    def wait(self) -> None:
        assert self.reached.wait(20)


class FakeEngine:
    """Writes down the order of things; steps with closes must not be launched ahead."""

    kv_cache: Any = None

    def __init__(self) -> None:
        self.stats = StepStats()
        self.order: list[str] = []
        self.steps: dict[int, FakeStep] = {}
        self.launched = {step: threading.Event() for step in range(10)}
        self.broken_launch: set[int] = set()
        self.broken_complete: set[int] = set()

    def must_complete_before(self, command: StepCommand) -> bool:
        return len(column(command.closes)) > 0

    def launch(self, command: StepCommand) -> FakeStep:
        number = command.step_id
        self.order.append(f"launch {number}")
        self.steps[number] = FakeStep(command, bool(command.masked_slots))
        self.launched[number].set()
        if number in self.broken_launch:
            raise RuntimeError("CUDA error: no kernel image")
        return self.steps[number]

    def complete(self, step: FakeStep, masks: MaskSource, incarnation: int, queue_ms: float = 0.0) -> StepResult:
        number = step.command.step_id
        if step.deferred:
            masks(number)
        step.wait()
        self.order.append(f"complete {number}")
        if number in self.broken_complete:
            raise RuntimeError("boom")
        return StepResult(number, step.command.epoch, incarnation, b"")

    def execute(self, command: StepCommand, masks: MaskSource, incarnation: int, queue_ms: float = 0.0) -> StepResult:
        raise AssertionError("an engine in two halves is not asked for the whole")

    def reset(self) -> None:
        self.order.append("reset")


class Scene:
    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.compute = ComputeThread()
        self.activity = Activity()
        self.answers: asyncio.Queue[StepResult | WorkerFault] = asyncio.Queue()
        self.executor = Executor(self.engine, self.activity, self.compute, self._reply)
        self.session = Session(7, 1, 2)

    def _reply(self, session: Session, message: StepResult | WorkerFault) -> None:
        self.answers.put_nowait(message)

    def submit(self, step: int, **fields: Any) -> None:
        command = StepCommand(step_id=step, epoch=1, **fields)
        self.session.admit(command)
        self.executor.submit(self.session, command)

    async def launched(self, step: int) -> None:
        assert await asyncio.to_thread(self.engine.launched[step].wait, 20)

    async def reach(self, step: int) -> None:
        await self.launched(step)
        await self.idle()
        self.engine.steps[step].reached.set()

    async def idle(self) -> None:
        """Everything that was submitted has run."""
        await self.compute.call(lambda: None)

    async def answer(self) -> StepResult | WorkerFault:
        return await asyncio.wait_for(self.answers.get(), 20)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    yield scene
    for step in scene.engine.steps.values():
        step.reached.set()
    scene.executor.close()
    assert await scene.compute.stop(20)


async def test_the_next_step_is_launched_before_this_one_is_complete(scene: Scene) -> None:
    scene.submit(0)
    await scene.launched(0)
    scene.submit(1)  # comes while the device is busy, and is launched meanwhile
    await scene.launched(1)
    assert scene.engine.order == ["launch 0", "launch 1"]
    assert scene.activity.step_age_ms() > 0
    await scene.reach(0)
    assert (await scene.answer()).step_id == 0
    await scene.reach(1)
    assert (await scene.answer()).step_id == 1
    assert scene.engine.order[2:] == ["complete 0", "complete 1"]
    assert (scene.activity.last_step, scene.activity.steps, scene.activity.step_age_ms()) == (1, 2, 0.0)


async def test_no_more_than_two_steps_are_under_way(scene: Scene) -> None:
    for step in range(3):
        scene.submit(step)
    await scene.launched(1)
    scene.engine.steps[0].reached.set()
    assert (await scene.answer()).step_id == 0
    await scene.launched(2)
    assert scene.engine.order == ["launch 0", "launch 1", "complete 0", "launch 2"]


async def test_a_step_that_takes_a_row_away_comes_after_it(scene: Scene) -> None:
    scene.submit(0)
    scene.submit(1, closes=pack([3]))
    await scene.launched(0)
    scene.engine.steps[0].reached.set()
    await scene.launched(1)
    assert scene.engine.order == ["launch 0", "complete 0", "launch 1"]


async def test_a_masked_step_is_launched_ahead_and_waits_for_its_masks_after_the_result_before_it(scene: Scene) -> None:
    scene.submit(0)
    await scene.launched(0)
    scene.submit(1, masked_slots=pack([3]))
    await scene.launched(1)
    scene.engine.steps[0].reached.set()
    assert (await scene.answer()).step_id == 0
    scene.session.put_masks(TokenMasks(1, 1, pack([3])), b"")
    scene.engine.steps[1].reached.set()
    assert (await scene.answer()).step_id == 1
    assert scene.engine.order == ["launch 0", "launch 1", "complete 0", "complete 1"]


async def test_a_fault_on_the_device_is_told_once_and_nothing_later_is_executed(scene: Scene) -> None:
    scene.engine.broken_complete = {0}
    scene.submit(0)
    scene.submit(1)
    await scene.launched(1)
    scene.submit(2)
    for step in (0, 1):
        scene.engine.steps[step].reached.set()
    fault = await scene.answer()
    assert isinstance(fault, WorkerFault)
    assert (fault.step_id, fault.kind, fault.incarnation) == (0, "internal", 7)
    scene.executor.reset()
    await scene.idle()
    assert scene.answers.empty()
    assert scene.engine.order == ["launch 0", "launch 1", "complete 0", "reset"]
    assert scene.activity.step_age_ms() == 0.0


async def test_a_step_that_cannot_be_launched_leaves_the_one_before_it_its_result(scene: Scene) -> None:
    scene.engine.broken_launch = {1}
    scene.submit(0)
    scene.submit(1)
    await scene.launched(1)
    scene.engine.steps[0].reached.set()
    assert (await scene.answer()).step_id == 0
    fault = await scene.answer()
    assert isinstance(fault, WorkerFault)
    assert (fault.step_id, fault.kind) == (1, "cuda")
    await scene.idle()
    assert scene.answers.empty()


async def test_a_command_that_is_none_is_a_fault_after_the_result_before_it(scene: Scene) -> None:
    scene.submit(0)
    await scene.launched(0)
    scene.submit(1, closes=b"odd")
    scene.engine.steps[0].reached.set()
    assert (await scene.answer()).step_id == 0
    fault = await scene.answer()
    assert isinstance(fault, WorkerFault)
    assert (fault.step_id, fault.kind) == (1, "protocol")
    assert scene.engine.order == ["launch 0", "complete 0"]


async def test_an_error_of_an_earlier_step_that_shows_at_a_launch_is_that_steps_fault(scene: Scene) -> None:
    scene.engine.broken_launch, scene.engine.broken_complete = {1}, {0}
    scene.submit(0)
    scene.submit(1)
    await scene.launched(1)
    scene.engine.steps[0].reached.set()
    fault = await scene.answer()
    assert isinstance(fault, WorkerFault)
    assert fault.step_id == 0
    await scene.idle()
    assert scene.answers.empty()


async def test_what_is_under_way_at_a_reset_has_no_result(scene: Scene) -> None:
    scene.submit(0)
    await scene.launched(0)
    scene.session.end()
    scene.executor.reset()
    await scene.idle()
    scene.engine.steps[0].reached.set()
    scene.session = Session(8, 1, 2)
    scene.engine.launched[0].clear()
    scene.submit(0)
    await scene.launched(0)
    scene.engine.steps[0].reached.set()
    assert (await scene.answer()).incarnation == 8
    assert scene.engine.order == ["launch 0", "reset", "launch 0", "complete 0"]
