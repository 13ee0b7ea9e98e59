"""The worker against a scripted scheduler over real sockets: steps, masks, faults."""

from __future__ import annotations

import numpy as np
import pytest

from shared.ints import pack
from shared.messages.control import Heartbeat
from shared.messages.step import (
    StepCommand,
    TokenMasks,
    WorkerFault,
    WorkerHello,
    WorkerReset,
    WorkerWelcome,
)
from tests.gpu_worker.toy_engine import open_slot, prefill, tokens, toy_greedy
from tests.gpu_worker.worker_stage import PROMPT, WORDS, Stage


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
