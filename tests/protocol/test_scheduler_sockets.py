"""The scheduler service over real sockets: plain work, and every way a peer can go."""

from __future__ import annotations

import asyncio

import pytest

from shared.messages.step import WorkerDrain
from shared.messages.stream import FinishReason, StopMatched
from tests.fake_model import generate
from tests.local_fleet import tokens
from tests.protocol.house import House


@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_requests_over_sockets_get_their_tokens(house: House, depth: int) -> None:
    await house.scheduler()
    worker = await house.worker(max_inflight_steps=depth)
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    for index in range(16):
        frontend.submit(f"r{index}", tokens(30 + 7 * index, seed=index), 12)
    rids = [f"r{index}" for index in range(16)]
    await detokenizer.until(lambda: detokenizer.finished(*rids))
    for index in range(16):
        assert detokenizer.streams[f"r{index}"].tokens == generate(tokens(30 + 7 * index, seed=index), 12)
    assert worker.error is None


async def test_hellos_are_answered_at_once(house: House) -> None:
    await house.scheduler()
    frontend = await house.frontend()
    assert frontend.record.status is not None
    assert not frontend.record.status.ready
    assert frontend.record.status.detail
    detokenizer = await house.detokenizer()
    assert detokenizer.record.pongs
    await house.worker()
    await frontend.until(lambda: frontend.record.status.ready)
    assert frontend.record.status.detokenizers == (("detok/1", "ipc://detok"),)
    assert frontend.record.status.max_request_tokens == 255 * 16


@pytest.mark.parametrize(
    "wrong",
    [
        {"page_size": 8},
        {"model_digest": "other"},
        {"vocab_size": 7},
        {"kv_dtype": "int8"},
        {"kv_layout": "NHD"},
        {"protocol": 99},
    ],
)
async def test_a_worker_unlike_the_fleet_is_refused_for_good(house: House, wrong: dict[str, object]) -> None:
    await house.scheduler()
    first = await house.worker("w0")
    second = await house.worker("w1", **wrong)
    assert first.reset is None
    assert second.reset is not None
    assert second.reset.fatal


async def test_a_dead_worker_is_replaced_without_losing_a_token(house: House) -> None:
    await house.scheduler()
    worker = await house.worker(step_s=0.005)
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    for index in range(4):
        frontend.submit(f"r{index}", tokens(40, seed=index), 60)
    await detokenizer.until(lambda: len(detokenizer.streams) == 4 and worker.num_results > 10)
    await worker.close()
    await frontend.until(lambda: not frontend.record.status.workers, timeout=3)
    assert not frontend.record.status.ready
    await house.worker(incarnation=2)
    rids = [f"r{index}" for index in range(4)]
    await detokenizer.until(lambda: detokenizer.finished(*rids))
    for index in range(4):
        assert detokenizer.streams[f"r{index}"].tokens == generate(tokens(40, seed=index), 60)
        assert detokenizer.streams[f"r{index}"].retractions == 1


async def test_a_frozen_worker_is_dropped_and_its_later_words_are_not_believed(house: House) -> None:
    await house.scheduler(heartbeat_timeout=2.0)
    zombie = await house.worker("w0", step_s=0.005)
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    frontend.submit("r", tokens(40), 100)
    await detokenizer.until(lambda: zombie.num_results > 5)
    zombie.silent = True
    await house.worker("w1")
    await detokenizer.until(lambda: detokenizer.finished("r"))
    assert detokenizer.streams["r"].tokens == generate(tokens(40), 100)
    zombie.silent = False
    await zombie.until(lambda: zombie.reset is not None)
    await frontend.until(lambda: [w.worker_id for w in frontend.record.status.workers] == ["w1"])


async def test_a_lost_result_resets_the_worker(house: House) -> None:
    service = await house.scheduler()
    worker = await house.worker("w0", step_s=0.005)
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    frontend.submit("r", tokens(40), 50)
    await detokenizer.until(lambda: worker.num_results > 5)
    worker.lose_results = 1
    await worker.until(lambda: worker.reset is not None)
    assert "owed" in worker.reset.reason
    await house.worker("w0", incarnation=2)
    await detokenizer.until(lambda: detokenizer.finished("r"))
    assert detokenizer.streams["r"].tokens == generate(tokens(40), 50)
    assert service.scheduler.core.metrics.counters["workers_lost"] == 1


async def test_a_slow_worker_keeps_its_requests(house: House) -> None:
    await house.scheduler(heartbeat_timeout=2.0)
    worker = await house.worker()
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    worker.gate.clear()
    frontend.submit("r", tokens(40), 10)
    await frontend.until(lambda: frontend.record.status.num_running == 1)
    seen = frontend.record.num_statuses
    await frontend.until(lambda: frontend.record.num_statuses > seen + 2)  # longer than the silence allowed
    worker.gate.set()
    await detokenizer.until(lambda: detokenizer.finished("r"))
    assert detokenizer.streams["r"].retractions == 0


async def test_a_step_that_never_ends_costs_the_worker_its_place(house: House) -> None:
    await house.scheduler(step_timeout=0.3)
    stuck = await house.worker("w0")
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    stuck.gate.clear()
    frontend.submit("r", tokens(40), 10)
    await stuck.until(lambda: stuck.reset is not None)
    await house.worker("w1")
    await detokenizer.until(lambda: detokenizer.finished("r"))
    assert detokenizer.streams["r"].tokens == generate(tokens(40), 10)


async def test_a_draining_worker_hands_its_requests_over_and_is_told_to_go(house: House) -> None:
    await house.scheduler()
    leaving = await house.worker("w0", step_s=0.005)
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    frontend.submit("r", tokens(40), 60)
    await detokenizer.until(lambda: leaving.num_results > 5)
    staying = await house.worker("w1")
    leaving.client.send(WorkerDrain(1, 10.0))
    await leaving.until(lambda: leaving.drained is not None)
    await detokenizer.until(lambda: detokenizer.finished("r"))
    assert detokenizer.streams["r"].tokens == generate(tokens(40), 60)
    assert staying.num_results > 0
    assert leaving.reset is None


async def test_the_only_worker_drains_by_finishing(house: House) -> None:
    await house.scheduler()
    worker = await house.worker("w0", step_s=0.005)
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    frontend.submit("r", tokens(40), 30)
    await detokenizer.until(lambda: worker.num_results > 3)
    worker.client.send(WorkerDrain(1, 10.0))
    await worker.until(lambda: worker.drained is not None)
    await detokenizer.until(lambda: detokenizer.finished("r"))
    assert detokenizer.streams["r"].retractions == 0


async def test_a_lost_detokenizer_is_replaced_with_all_tokens_so_far(house: House) -> None:
    await house.scheduler()
    worker = await house.worker(step_s=0.005)
    lost, frontend = await house.detokenizer("a"), await house.frontend()
    frontend.submit("r", tokens(40), 80)
    await lost.until(lambda: "r" in lost.streams and len(lost.streams["r"].tokens) > 10)
    await lost.close()
    await frontend.until(lambda: not frontend.record.status.ready)
    heir = await house.detokenizer("b")
    await heir.until(lambda: heir.finished("r"))
    assert heir.streams["r"].tokens == generate(tokens(40), 80)
    assert len(heir.streams["r"].opening.output_ids) >= 4 * 10
    assert worker.error is None


async def test_a_finished_stream_is_opened_again_until_it_is_acknowledged(house: House) -> None:
    service = await house.scheduler()
    await house.worker()
    lost, frontend = await house.detokenizer("a"), await house.frontend()
    frontend.submit("kept", tokens(10), 5)
    frontend.submit("acknowledged", tokens(12), 5)
    await lost.until(lambda: lost.finished("kept", "acknowledged"))
    frontend.acknowledge("acknowledged")
    requests = service.scheduler.core.lifecycle.requests
    await frontend.operate("requests")  # the acknowledgement was handled before it
    assert list(requests) == ["kept"]
    await lost.close()
    heir = await house.detokenizer("b")
    await heir.until(lambda: heir.finished("kept"))
    assert heir.streams["kept"].tokens == generate(tokens(10), 5)
    assert "acknowledged" not in heir.streams


async def test_a_lost_tokenizer_takes_its_requests_with_it(house: House) -> None:
    service = await house.scheduler()
    await house.worker(step_s=0.005)
    detokenizer = await house.detokenizer()
    lost, other = await house.frontend("a"), await house.frontend("b")
    lost.submit("mine", tokens(40), 3000)
    other.submit("others", tokens(41), 200)
    await detokenizer.until(lambda: len(detokenizer.streams) == 2)
    await lost.close()
    await detokenizer.until(lambda: detokenizer.finished("mine"))
    assert detokenizer.streams["mine"].finish.reason is FinishReason.ABORT
    await detokenizer.until(lambda: detokenizer.finished("others"))
    assert detokenizer.streams["others"].tokens == generate(tokens(41), 200)
    await other.until(lambda: "mine" not in service.scheduler.core.lifecycle.requests)


async def test_a_new_scheduler_goes_on_where_the_frontend_is(house: House) -> None:
    await house.scheduler()
    worker = await house.worker(step_s=0.005)
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    prompt = tokens(40)
    frontend.submit("r", prompt, 40)
    await detokenizer.until(lambda: "r" in detokenizer.streams and len(detokenizer.streams["r"].tokens) > 10)
    held = detokenizer.streams["r"].tokens[:10]
    first_epoch = frontend.record.status.epoch
    await worker.close()
    await house.restart_scheduler()
    await frontend.until(lambda: frontend.record.status.epoch > first_epoch)
    await house.worker(incarnation=2)
    frontend.resubmit("r", prompt, held, 40, epoch=first_epoch)  # stale: dropped without a word
    frontend.resubmit("r", prompt, held, 40, epoch=frontend.record.status.epoch)
    heir = await house.detokenizer("heir")
    waits = [asyncio.create_task(peer.until(lambda peer=peer: peer.finished("r"))) for peer in (heir, detokenizer)]
    _, idle = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in idle:
        wait.cancel()
    stream = (heir if "r" in heir.streams else detokenizer).streams["r"]
    assert stream.tokens == generate(prompt, 40)
    assert not frontend.record.rejected


async def test_a_matched_stop_string_ends_the_request(house: House) -> None:
    service = await house.scheduler()
    await house.worker(step_s=0.005)
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    frontend.submit("r", tokens(40), 1000)
    await detokenizer.until(lambda: "r" in detokenizer.streams and len(detokenizer.streams["r"].tokens) > 5)
    for _ in range(2):  # repeating it changes nothing
        detokenizer.client.send(StopMatched("r", 4, "stop"))
    request = service.scheduler.core.lifecycle.requests["r"]
    await frontend.until(lambda: request.finish is not None)  # asked again with every status
    assert request.output.tolist() == generate(tokens(40), 4)
    assert request.finish.matched_string == "stop"
    assert detokenizer.streams["r"].finish is None


async def test_sigterm_refuses_newcomers_and_finishes_the_rest(house: House) -> None:
    service = await house.scheduler()
    worker = await house.worker(step_s=0.01)
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    frontend.submit("r", tokens(40), 30)
    await detokenizer.until(lambda: worker.num_results > 3)
    draining = house.spawn(service.drain())
    await frontend.until(lambda: not frontend.record.status.ready)
    frontend.submit("late", tokens(5), 5)
    await frontend.until(lambda: "late" in frontend.record.rejected)
    assert frontend.record.rejected["late"].code == "draining"
    await draining
    assert detokenizer.streams["r"].tokens == generate(tokens(40), 30)
