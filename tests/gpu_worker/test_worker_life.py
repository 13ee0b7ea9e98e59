"""The worker against a scripted scheduler over real sockets: resets, leaving, pages on their way."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shared.ints import pack
from shared.messages.control import Heartbeat, Ping, Pong
from shared.messages.kv import KvCancel, KvDone, KvReady, KvReceive, KvSend
from shared.messages.step import (
    Drain,
    WorkerDrain,
    WorkerFault,
    WorkerHello,
    WorkerReset,
    WorkerWelcome,
)
from tests.gpu_worker.toy_engine import open_slot, prefill, tokens, toy_greedy
from tests.gpu_worker.worker_stage import PROMPT, Script, Stage


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


async def test_pages_of_a_new_life_move_once_the_last_step_of_the_one_before_has_ended(stage: Stage) -> None:
    """Until then that step may write them."""
    script = stage.script
    hello = await script.welcome()
    stage.gate.clear()
    script.open()
    await stage.reached_forward()
    script.send(WorkerReset(3, "you were silent"))
    again = await script.next(WorkerHello)
    while again.incarnation == hello.incarnation:
        again = await script.next(WorkerHello)
    script.send(WorkerWelcome(4))
    for order in (KvReceive(7, pack([1]), "w2"), KvCancel(7), KvReceive(8, pack([1, 2]), "w2")):
        script.send(order)
    script.send(Ping(1))
    await script.next(Pong)  # and nothing before it
    stage.gate.set()
    assert await script.next(KvReady) == KvReady(7, again.incarnation)
    assert (await script.next(KvDone)).transfer_id == 7
    assert await script.next(KvReady) == KvReady(8, again.incarnation)


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
