"""The worker against a scripted scheduler over real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from services.gpu_worker.startup import StartedEngine
from services.gpu_worker.worker import Worker
from shared.config import WorkerConfig
from shared.ints import pack
from shared.messages.control import Heartbeat, Ping, Pong
from shared.messages.edges import FromWorker
from shared.messages.kv import KvCancel, KvDone, KvReady, KvReceive, KvSend
from shared.messages.step import (
    Drain,
    StepCommand,
    StepResult,
    TokenMasks,
    WorkerDrain,
    WorkerFault,
    WorkerHello,
    WorkerReset,
    WorkerWelcome,
)
from shared.transport import Frames, Server
from tests.gpu_worker.toy_engine import VOCAB, Bench, open_slot, prefill, tokens, toy_greedy

M = TypeVar("M")
PROMPT = [5, 17, 3]
WORDS = -(-VOCAB // 32)


class Script:
    """A scheduler that does what the test says."""

    def __init__(self, endpoint: str) -> None:
        self.inbox: asyncio.Queue[tuple[bytes, Any]] = asyncio.Queue()
        self.server: Server[FromWorker] = Server(endpoint, FromWorker, self._on_message)
        self.identity = b""
        self.steps = 0
        self.epoch = 3

    def _on_message(self, identity: bytes, message: FromWorker, frames: Frames) -> None:
        self.inbox.put_nowait((identity, message))

    async def next(self, kind: type[M]) -> M:
        """The next message of that kind; heartbeats and repeated hellos in between are passed over."""
        async with asyncio.timeout(20):
            while True:
                sender, message = await self.inbox.get()
                if isinstance(message, kind):
                    self.identity = sender
                    return message
                assert isinstance(message, (Heartbeat, WorkerHello)), message

    async def welcome(self) -> WorkerHello:
        hello = await self.next(WorkerHello)
        self.send(WorkerWelcome(self.epoch))
        self.steps = 0
        return hello

    def send(self, message: Any, *frames: bytes) -> None:
        self.server.send(self.identity, message, *frames)

    def step(self, decode: list[int] | None = None, **fields: Any) -> int:
        step = self.steps
        self.send(StepCommand(step_id=step, epoch=self.epoch, decode_slots=pack(decode or []), **fields))
        self.steps += 1
        return step

    def open(self, slot: int = 0, **fields: Any) -> int:
        pages = [slot * 4 + i for i in range(4)]
        return self.step(opens=(open_slot(slot, 3, pages, **fields),), prefills=(prefill(slot, PROMPT),))

    async def result(self) -> StepResult:
        return await self.next(StepResult)


class Stage:
    """A worker with a toy engine whose forward can be held up, and its scheduler."""

    def __init__(self, folder: Path) -> None:
        self.endpoint = f"ipc://{folder}/worker"
        self.bench = Bench()
        self.gate = threading.Event()
        self.gate.set()
        self.in_forward = threading.Event()
        self.ended = asyncio.Event()
        forward = self.bench.runner.forward

        def gated(batch: Any) -> Any:
            self.in_forward.set()
            assert self.gate.wait(20)
            return forward(batch)

        self.bench.runner.forward = gated  # type: ignore[method-assign]
        config = WorkerConfig(scheduler=self.endpoint, service_id="w1", drain_timeout=5.0)
        self.worker = Worker(config, self._start, self.ended.set)
        self.script = Script(self.endpoint)

    def _start(self, config: WorkerConfig) -> StartedEngine:
        limits = self.bench.limits
        hello = WorkerHello(
            worker_id="",
            incarnation=0,
            model="toy",
            model_digest="d",
            page_size=limits.page_size,
            num_pages=limits.num_pages,
            max_slots=limits.max_slots,
            max_batched_tokens=64,
            max_context=limits.max_context,
            max_inflight_steps=config.max_inflight_steps,
            vocab_size=limits.vocab_size,
            device="cpu",
            kv_dtype="float32",
            kv_layout="HND",
            kv_bytes_per_page=16,
        )
        return StartedEngine(self.bench.engine, hello)

    async def reached_forward(self) -> None:
        assert await asyncio.to_thread(self.in_forward.wait, 20)
        self.in_forward.clear()

    async def waits_for_masks(self) -> None:
        """The step in execution has done its forward and waits."""
        await self.reached_forward()
        self.gate.set()
        while True:
            self.worker.heartbeat()
            if (await self.script.next(Heartbeat)).step_age_ms == 0:
                return

    async def turn(self) -> None:
        """Everything sent so far has gone through the worker's loop."""
        self.script.send(Ping(9))
        await self.script.next(Pong)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(tmp_path)
    await stage.worker.start()
    yield stage
    stage.gate.set()
    await stage.worker.close()
    assert not stage.worker.is_computing
    stage.script.server.close()


async def test_hello_is_repeated_until_welcome(stage: Stage) -> None:
    first = await stage.script.next(WorkerHello)
    second = await stage.script.next(WorkerHello)
    assert first == second
    assert first.worker_id == "w1"
    assert first.incarnation > 0
    assert (first.num_pages, first.max_slots, first.max_inflight_steps) == (64, 8, 2)
    assert stage.script.identity == f"w1/{first.incarnation}".encode()
    await stage.script.welcome()
    stage.script.open()
    assert (await stage.script.result()).incarnation == first.incarnation


async def test_a_repeated_welcome_changes_nothing(stage: Stage) -> None:
    await stage.script.welcome()
    stage.script.open()
    out = tokens(await stage.script.result())
    stage.script.send(WorkerWelcome(3))
    stage.script.step([0])
    assert out + tokens(await stage.script.result()) == toy_greedy(PROMPT, 2)


async def test_two_commands_are_queued_and_done_in_order(stage: Stage) -> None:
    await stage.script.welcome()
    stage.gate.clear()
    stage.script.open()
    stage.script.step([0])
    await stage.reached_forward()
    stage.gate.set()
    first, second = await stage.script.result(), await stage.script.result()
    assert (first.step_id, second.step_id) == (0, 1)
    assert tokens(first) + tokens(second) == toy_greedy(PROMPT, 2)
    assert second.queue_ms > 0


async def test_a_slot_that_ended_is_skipped_in_the_queued_step(stage: Stage) -> None:
    await stage.script.welcome()
    stage.gate.clear()
    stage.script.open(remaining=1)
    stage.script.step([0])
    stage.gate.set()
    assert tokens(await stage.script.result()) == toy_greedy(PROMPT, 1)
    assert tokens(await stage.script.result()) == [-1]


def only(token: int) -> bytes:
    words = np.zeros((1, WORDS), dtype="<u4")
    words[0, token // 32] = 1 << (token % 32)
    return words.tobytes()


async def test_masks_may_come_before_their_command_and_after_the_forward(stage: Stage) -> None:
    script = stage.script
    await script.welcome()
    script.open()
    assert tokens(await script.result()) == toy_greedy(PROMPT, 1)
    script.send(TokenMasks(1, 3, pack([0])), only(42))
    script.step([0], masked_slots=pack([0]))
    assert tokens(await script.result()) == [42]
    stage.in_forward.clear()
    script.step([0], masked_slots=pack([0]))
    script.step([0])
    await stage.reached_forward()
    await stage.turn()
    script.send(TokenMasks(2, 3, pack([0])), only(43))
    late = await script.result()
    assert tokens(late) == [43]
    assert late.mask_wait_ms > 0
    assert tokens(await script.result()) == toy_greedy([*PROMPT, toy_greedy(PROMPT, 1)[0], 42, 43], 1)


async def test_a_masked_step_takes_its_masks_even_when_no_row_runs(stage: Stage) -> None:
    script = stage.script
    await script.welcome()
    script.open(remaining=1)
    script.step([0], masked_slots=pack([0]))
    await script.result()
    script.send(TokenMasks(1, 3, pack([0])), only(42))
    assert tokens(await script.result()) == [-1]


async def test_the_wait_for_masks_does_not_age_a_step(stage: Stage) -> None:
    script = stage.script
    await script.welcome()
    stage.gate.clear()
    script.step(opens=(open_slot(0, 3, [0, 1]),), prefills=(prefill(0, PROMPT),), masked_slots=pack([0]))
    await stage.reached_forward()
    stage.worker.heartbeat()
    assert (await script.next(Heartbeat)).step_age_ms > 0
    stage.in_forward.set()
    await stage.waits_for_masks()
    script.send(TokenMasks(0, 3, pack([0])), only(42))
    await script.result()


async def test_heartbeats_tell_what_was_done(stage: Stage) -> None:
    script = stage.script
    await script.welcome()
    script.open()
    await script.result()
    stage.worker.heartbeat()
    beat = await script.next(Heartbeat)
    assert beat.service_id == "w1"
    assert beat.last_step_id == 0
    assert beat.step_age_ms == 0
    assert beat.gauges["prefill_tokens"] == 3
    assert beat.gauges["memory_bytes"] > 1e6
    assert 0 <= beat.gauges["busy"] <= 1
    assert beat.histograms["forward_seconds"][-2] == 1


@pytest.mark.parametrize("command", [StepCommand(step_id=2, epoch=3), StepCommand(step_id=1, epoch=2)])
async def test_a_gap_is_a_fault_and_nothing_runs_until_the_reset(stage: Stage, command: StepCommand) -> None:
    script = stage.script
    hello = await script.welcome()
    script.open()
    await script.result()
    script.send(command)
    fault = await script.next(WorkerFault)
    assert (fault.kind, fault.step_id, fault.incarnation) == ("protocol", command.step_id, hello.incarnation)
    script.step([0])
    await stage.turn()
    assert len(stage.bench.runner.batches) == 1
    script.send(WorkerReset(3, "gap"))
    assert (await script.welcome()).incarnation > hello.incarnation
    script.open()
    assert tokens(await script.result()) == toy_greedy(PROMPT, 1)


async def test_a_command_that_names_what_does_not_exist_is_a_protocol_fault(stage: Stage) -> None:
    await stage.script.welcome()
    stage.script.step([5])
    stage.script.step([5])
    fault = await stage.script.next(WorkerFault)
    assert (fault.kind, fault.step_id) == ("protocol", 0)
    assert "not open" in fault.detail
    await stage.turn()


async def test_reset_in_the_middle_of_a_step_drops_its_result_and_what_is_queued(stage: Stage) -> None:
    script = stage.script
    hello = await script.welcome()
    stage.gate.clear()
    script.open()
    script.step([0])
    await stage.reached_forward()
    script.send(WorkerReset(3, "you were silent"))
    again = await script.next(WorkerHello)
    while again.incarnation == hello.incarnation:
        again = await script.next(WorkerHello)
    assert script.identity == f"w1/{again.incarnation}".encode()
    script.send(WorkerWelcome(4))
    script.epoch, script.steps = 4, 0
    script.open()
    stage.gate.set()
    result = await script.result()
    assert (result.incarnation, result.epoch, result.step_id) == (again.incarnation, 4, 0)
    assert tokens(result) == toy_greedy(PROMPT, 1)
    assert len(stage.bench.runner.batches) == 2


async def test_reset_ends_the_wait_for_masks(stage: Stage) -> None:
    script = stage.script
    await script.welcome()
    script.step(opens=(open_slot(0, 3, [0, 1]),), prefills=(prefill(0, PROMPT),), masked_slots=pack([0]))
    await stage.waits_for_masks()
    script.send(WorkerReset(3, "again"))
    await script.welcome()
    script.open()
    assert tokens(await script.result()) == toy_greedy(PROMPT, 1)


@pytest.mark.parametrize(
    ("error", "kind"),
    [(RuntimeError("boom"), "internal"), (MemoryError(), "oom"), (RuntimeError("can't allocate memory"), "oom")],
)
async def test_an_exception_in_a_step_is_a_fault_and_the_next_incarnation_works(
    stage: Stage, error: Exception, kind: str
) -> None:
    script = stage.script
    await script.welcome()
    stage.bench.runner.error = error
    stage.gate.clear()
    script.open(0)
    script.open(1)
    stage.gate.set()
    fault = await script.next(WorkerFault)
    assert (fault.kind, fault.step_id) == (kind, 0)
    assert type(error).__name__ in fault.detail
    stage.bench.runner.error = None
    await stage.turn()
    script.send(WorkerReset(3, "fault"))
    await script.welcome()
    script.open()
    assert tokens(await script.result()) == toy_greedy(PROMPT, 1)
    assert len(stage.bench.runner.batches) == 1  # the step behind the failed one was not executed


async def test_one_bad_row_leaves_the_others_alone(stage: Stage) -> None:
    script = stage.script
    await script.welcome()
    stage.bench.runner.broken_tokens = {toy_greedy(PROMPT, 1)[0]}
    script.open(0)
    script.step(opens=(open_slot(1, 3, [8, 9]),), prefills=(prefill(1, [9, 9, 9]),), decode=[0])
    await script.result()
    result = await script.result()
    assert tokens(result) == [-1, toy_greedy([9, 9, 9], 1)[0]]
    assert [e.slot for e in result.errors] == [0]


async def test_a_new_epoch_starts_at_step_0_with_no_slots(stage: Stage) -> None:
    script = stage.script
    await script.welcome()
    script.open()
    await script.result()
    script.send(WorkerWelcome(4))
    script.epoch, script.steps = 4, 0
    script.open()
    result = await script.result()
    assert (result.step_id, result.epoch) == (0, 4)


async def test_a_scheduler_that_is_gone_is_greeted_again_by_a_new_incarnation(stage: Stage) -> None:
    hello = await stage.script.welcome()
    stage.script.open()
    await stage.script.result()
    stage.script.server.close()
    stage.script = Script(stage.endpoint)
    again = await stage.script.welcome()
    assert again.incarnation > hello.incarnation
    stage.script.open()
    assert tokens(await stage.script.result()) == toy_greedy(PROMPT, 1)


async def test_a_fatal_reset_ends_the_process_with_1(stage: Stage) -> None:
    await stage.script.next(WorkerHello)
    stage.script.send(WorkerReset(3, "another model", fatal=True))
    async with asyncio.timeout(20):
        await stage.ended.wait()
        await stage.worker.drain()
    assert stage.worker.exit_code == 1


async def test_sigterm_asks_to_leave_and_works_on_until_it_may(stage: Stage) -> None:
    script = stage.script
    hello = await script.welcome()
    script.open()
    await script.result()
    draining = asyncio.create_task(stage.worker.drain())
    asked = await script.next(WorkerDrain)
    assert (asked.incarnation, asked.deadline_s) == (hello.incarnation, 5.0)
    assert (await script.next(Heartbeat)).gauges["draining"] == 1
    script.step([0])
    assert tokens(await script.result()) == toy_greedy(PROMPT, 2)[1:]
    assert not draining.done()
    script.send(Drain(5.0))
    async with asyncio.timeout(20):
        await draining
    assert stage.worker.exit_code == 0


async def test_drain_by_the_scheduler_ends_the_process_with_0(stage: Stage) -> None:
    await stage.script.welcome()
    stage.script.send(Drain(5.0))
    async with asyncio.timeout(20):
        await stage.ended.wait()
        await stage.worker.drain()
    assert stage.worker.exit_code == 0


async def test_nobody_waits_for_a_scheduler_that_goes_while_we_drain(stage: Stage) -> None:
    await stage.script.welcome()
    await stage.turn()
    draining = asyncio.create_task(stage.worker.drain())
    await stage.script.next(WorkerDrain)
    stage.script.server.close()
    async with asyncio.timeout(20):
        await draining
    stage.script = Script(stage.endpoint)


async def test_pages_that_nobody_sends_can_be_given_up(stage: Stage) -> None:
    hello = await stage.script.welcome()
    assert len(hello.kv_endpoints) == 1
    stage.script.send(KvReceive(5, pack([1, 2]), "w2"))
    assert await stage.script.next(KvReady) == KvReady(5, hello.incarnation)
    stage.script.send(KvCancel(5))
    assert await stage.script.next(KvDone) == KvDone(5, hello.incarnation, "received", ok=False, detail="cancelled")


async def test_a_worker_sends_pages_to_itself_while_it_computes(stage: Stage) -> None:
    """The step in execution neither waits for the pages nor are they held up by it."""
    hello = await stage.script.welcome()
    stage.script.open()
    await stage.script.result()
    stage.in_forward.clear()
    stage.gate.clear()
    stage.script.step([0])
    await stage.reached_forward()
    stage.script.send(KvReceive(1, pack([40]), "w1"))
    await stage.script.next(KvReady)
    stage.script.send(KvSend(1, pack([0]), "w1", hello.kv_endpoints))
    sides = {(await stage.script.next(KvDone)).side for _ in range(2)}
    assert sides == {"sent", "received"}
    keys = stage.bench.runner.kv_cache.layers[0]
    assert torch.equal(keys[40], keys[0])
    stage.gate.set()
    assert tokens(await stage.script.result()) == toy_greedy(PROMPT, 2)[1:]
