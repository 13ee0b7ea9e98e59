"""Pages by NIXL: every bit of them, and whatever fails there arrives by the sockets or not at all."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from services.gpu_worker.transfer import carrier, mover, offers, reads
from services.gpu_worker.transfer.carrier import Carrier
from services.gpu_worker.transfer.nixl_api import import_nixl
from services.gpu_worker.transfer.page_io import PageIO
from shared.messages.kv import KvCancel, KvChunk, KvDone, KvOffer, KvReady, KvTaken
from tests.gpu_worker.flashinfer_signatures import NIXL_SIGNATURES
from tests.gpu_worker.nixl_fake import FakeNixl, FakeRead, copy
from tests.gpu_worker.transfer_ends import End, Make, moved_each_way_at_once

installed = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "SLOT_BYTES", 4000)  # two pages


@pytest.fixture
def net() -> FakeNixl:
    return FakeNixl()


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    ends: list[End] = []

    def add(nixl: Any, **fields: Any) -> End:
        ends.append(End(f"ipc://{tmp_path}/{len(ends)}", nixl=nixl, **fields))
        return ends[-1]

    yield add
    for end in ends:
        end.close()


async def moved(source: End, target: End, transfer_id: int = 1) -> None:
    """A transfer of 19 pages ends well, bit by bit, and touches nothing else."""
    pages, into = list(range(40, 3, -2)), list(range(19))
    untouched = [layer[19:].clone() for layer in target.cache.layers]
    target.receive(transfer_id, into)
    assert await target.next() == KvReady(transfer_id, 7)
    source.send(transfer_id, pages, target)
    assert await source.next() == KvDone(transfer_id, 7, "sent", ok=True)
    assert await target.next() == KvDone(transfer_id, 7, "received", ok=True)
    for ours, theirs, kept in zip(target.cache.layers, source.cache.layers, untouched, strict=True):
        assert torch.equal(ours[into], theirs[pages])
        assert torch.equal(ours[19:], kept)


def by_nixl(end: End) -> int:
    return int(end.transfers.gauges()["kv_nixl_pages_in"])


@pytest.mark.parametrize("api", ["fake", pytest.param("nixl", marks=installed)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_pages_arrive_bit_by_bit(make: Make, net: FakeNixl, dtype: torch.dtype, api: str) -> None:
    nixl = net if api == "fake" else import_nixl(one_machine=True)
    source, target = make(nixl, dtype=dtype), make(nixl, dtype=dtype)
    assert target.transfers.endpoints[1].startswith("nixl:radixfleet-")
    await moved(source, target)
    assert by_nixl(target) == target.transfers.gauges()["kv_pages_in"] == 19
    await moved(target, source, 2)  # and back
    assert by_nixl(source) == 19
    assert source.transfers.gauges()["kv_nixl_failed"] == target.transfers.gauges()["kv_nixl_failed"] == 0


@pytest.mark.parametrize("api", ["fake", pytest.param("nixl", marks=installed)])
async def test_several_transfers_each_way_at_once(make: Make, net: FakeNixl, api: str) -> None:
    nixl = net if api == "fake" else import_nixl(one_machine=True)
    net.delay = 3
    one, other = make(nixl), make(nixl)
    await moved_each_way_at_once(one, other)
    assert by_nixl(one) == by_nixl(other) == 32


async def test_every_call_is_one_that_nixl_takes(make: Make, net: FakeNixl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carrier, "MAX_AGENTS", 1)
    target = make(net)
    for number, source in enumerate((make(net), make(net))):
        await moved(source, target, number)
    target.close()
    assert net.calls == set(NIXL_SIGNATURES)
    assert all(read.released for read in net.reads)


@pytest.mark.parametrize("fault", ["error", "raise", "refuse", "metadata", "hang"])
async def test_what_fails_with_nixl_arrives_by_the_socket(
    make: Make, net: FakeNixl, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reads, "READ_S", 0.01)
    source, target = make(net), make(net)
    net.fault = fault
    await moved(source, target)
    assert by_nixl(target) == 0
    assert target.transfers.gauges()["kv_nixl_failed"] >= 1
    net.unstick()
    await moved(source, target, 2)
    assert by_nixl(target) == 0  # this target is not offered anything for a while
    monkeypatch.setattr(offers.time, "monotonic", lambda now=offers.time.monotonic: now() + offers.DOUBT_S)
    await moved(source, target, 3)
    assert by_nixl(target) == 19


async def test_a_transfer_that_fails_half_way_goes_on_by_the_socket(make: Make, net: FakeNixl) -> None:
    source, target = make(net), make(net)

    def spoil(read: FakeRead) -> None:
        if len(net.reads) == 4:
            net.fault = "error"

    net.on_read = spoil
    await moved(source, target)
    assert 0 < by_nixl(target) < 19


async def test_a_refusal_that_overtakes_a_read_loses_none_of_its_pages(make: Make, net: FakeNixl) -> None:
    source, target = make(net), make(net)
    net.delay = 5

    def refuse_the_next(read: FakeRead) -> None:
        net.fault = "refuse" if len(net.reads) == 3 else ""

    net.on_read = refuse_the_next
    await moved(source, target)
    assert by_nixl(target) <= 6


@pytest.mark.parametrize("seed", range(12))
async def test_whatever_reads_do_all_pages_arrive(
    make: Make, net: FakeNixl, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three sources at once, reads that take their time, fail at any point, or do not end."""
    monkeypatch.setattr(reads, "READ_S", 0.02)
    monkeypatch.setattr(offers, "DOUBT_S", 0.0)
    chance = random.Random(seed)
    target, sources = make(net), [make(net) for _ in range(3)]

    def next_read(read: FakeRead) -> None:
        read.left = chance.randrange(6)
        read.fails = chance.random() < 0.1
        read.stuck = chance.random() < 0.03
        net.fault = "refuse" if chance.random() < 0.1 else ""

    net.on_read = next_read
    for turn in range(2):
        for number in range(3):
            target.receive(10 * turn + number, list(range(20 * number, 20 * number + 15)))
            assert isinstance(await target.next(), KvReady)
        for number, source in enumerate(sources):
            source.send(10 * turn + number, list(range(turn, 15 + turn)), target)
        assert all([(await target.next()).ok for _ in sources])
        for number, source in enumerate(sources):
            assert (await source.next()).ok
            for ours, theirs in zip(target.cache.layers, source.cache.layers, strict=True):
                assert torch.equal(ours[20 * number : 20 * number + 15], theirs[turn : 15 + turn])


async def test_an_error_of_the_device_ends_a_transfer_and_not_the_thread(
    make: Make, net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make(net), make(net)

    def broken(staged: torch.Tensor) -> int:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(target.transfers._mover._pages, "checksum", broken)  # type: ignore[union-attr]
    await moved(source, target)
    assert by_nixl(target) == 0


async def test_what_nobody_foresaw_leaves_nobody_waiting(
    make: Make, net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mover, "PAUSE_S", 0.001)
    source, target = make(net), make(net)
    offered = target.transfers._mover.reads  # type: ignore[union-attr]
    assert offered is not None
    turn, faults = offered.turn, [KeyError("no such thing")]

    def fail_once() -> Any:
        if faults and offered._under_way:
            raise faults.pop()
        return turn()

    monkeypatch.setattr(offered, "turn", fail_once)
    net.fault = "hang"
    target.receive(1, list(range(19)))
    await target.next()
    source.send(1, list(range(19)), target)
    done = await target.next()
    assert (done.side, done.ok) == ("received", False)
    net.unstick()
    assert (await source.next()).ok  # as by the sockets: what became of it is the target's to tell
    await moved(source, target, 2)
    assert by_nixl(target) == 19


async def test_other_bytes_than_were_meant_are_not_taken(make: Make, net: FakeNixl) -> None:
    """As after a network that lies, or a source that has used its memory again."""
    source, target = make(net), make(net)

    def overwrite(read: FakeRead) -> None:
        if len(net.reads) == 3:
            address, size, _ = read.theirs[0]
            ctypes.memset(address, 1, size)

    net.on_read = overwrite
    await moved(source, target)
    assert by_nixl(target) == 4


async def test_a_read_that_is_given_up_never_reaches_a_page(
    make: Make, net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes may still come: the memory they come to holds nothing else until then."""
    monkeypatch.setattr(reads, "READ_S", 0.01)
    monkeypatch.setattr(offers, "DOUBT_S", 0.0)
    source, target = make(net), make(net)
    net.fault = "hang"
    await moved(source, target)
    late = list(net.reads)
    assert len(late) == carrier.SLOTS
    net.fault = ""
    await moved(source, target, 2)  # no memory is left to read to
    assert (len(net.reads), by_nixl(target)) == (carrier.SLOTS, 0)
    for read in late:
        assert not read.released
        copy(read)
    net.unstick()
    await moved(source, target, 3)
    assert by_nixl(target) == 19
    assert all(read.released for read in late)


async def test_nothing_is_written_after_a_cancel(make: Make, net: FakeNixl) -> None:
    source, target = make(net), make(net)
    before = [layer.clone() for layer in target.cache.layers]
    reading = asyncio.Event()
    loop = asyncio.get_running_loop()
    net.on_read = lambda read: loop.call_soon_threadsafe(reading.set) and None
    net.fault = "hang"
    target.receive(1, [1, 2, 3])
    await target.next()
    source.send(1, [4, 5, 6], target)
    await asyncio.wait_for(reading.wait(), 20)
    for end in (target, source):
        end.transfers.handle(KvCancel(1))
        assert not (await end.next()).ok
    net.unstick()
    monotonic = offers.time.monotonic
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offers.time, "monotonic", lambda: monotonic() + offers.DOUBT_S)
        target.receive(2, [9])
        await target.next()
        source.send(2, [9], target)
        assert (await target.next()).ok
        assert (await source.next()).ok
    for layer, was in zip(target.cache.layers, before, strict=True):
        assert torch.equal(layer[:9], was[:9])


async def test_a_new_life_hears_nothing_of_the_former_one(make: Make, net: FakeNixl) -> None:
    source, target = make(net), make(net)
    net.fault = "hang"
    target.receive(1, [1])
    await target.next()
    source.send(1, [1], target)
    for end in (source, target):
        end.transfers.end()
        end.transfers.begin(8)
    net.unstick()
    target.receive(2, [2])
    assert await target.next() == KvReady(2, 8)
    source.send(2, [2], target)
    assert await target.next() == KvDone(2, 8, "received", ok=True)
    assert await source.next() == KvDone(2, 8, "sent", ok=True)


async def test_with_a_worker_that_has_no_nixl_pages_go_by_the_socket(make: Make, net: FakeNixl) -> None:
    with_nixl, without = make(net), make(None)
    await moved(with_nixl, without)
    await moved(without, with_nixl, 2)
    assert by_nixl(with_nixl) == 0
    # One that had it when the scheduler told of it, and has none any more.
    without.receive(3, [1])
    assert await without.next() == KvReady(3, 7)
    with_nixl.transfers._sending.add(3)
    with_nixl.transfers._mover.send(3, [1], without.transfers.endpoints[0], nixl=True)  # type: ignore[union-attr]
    assert (await without.next()).ok
    assert (await with_nixl.next()).ok
    assert torch.equal(without.cache.layers[1][1], with_nixl.cache.layers[1][1])


async def test_a_format_that_differs_fails_the_transfer(make: Make, net: FakeNixl) -> None:
    source, target = make(net, dtype=torch.bfloat16), make(net, dtype=torch.float16)
    target.receive(1, [1])
    await target.next()
    source.send(1, [1], target)
    done = await target.next()
    assert (done.side, done.ok) == ("received", False)
    assert "bfloat16" in done.detail
    assert (await source.next()).ok  # as by the sockets: what became of it is the target's to tell
    assert net.reads == []


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"address": 4096}, True),  # not registered
        ({"agent": "somebody"}, True),  # whose metadata it is not
        ({"metadata": b"metadata of \xff\xfe"}, True),  # of an agent whose name is no text
        ({"count": 0}, False),
        ({"count": 5}, False),
        ({"count": 1 << 40}, False),
        ({"format": "float16"}, False),
        ({"transfer_id": 9}, False),
    ],
)
async def test_offers_that_make_no_sense_are_not_read(
    make: Make, net: FakeNixl, tmp_path: Path, fields: dict[str, Any], refused: bool
) -> None:
    target, other = make(net), make(net)
    before = [layer.clone() for layer in target.cache.layers]
    target.receive(1, [5, 6])
    await target.next()
    stranger = Carrier(net, PageIO(other.cache))
    chunk: dict[str, Any] = {"transfer_id": 1, "first": 0, "count": 2, "last": True, "checksum": 7, "format": "float32"}
    offer: dict[str, Any] = {"agent": stranger.name, "address": stranger.to_send[0].address}
    for name, value in fields.items():
        (chunk if name in chunk else offer)[name] = value
    metadata = offer.pop("metadata", stranger.metadata)
    answers = f"ipc://{tmp_path}/answers"
    message = KvOffer(chunk=KvChunk(**chunk), memory="DRAM", device=0, answer_to=answers, **offer)
    with zmq.Context.instance().socket(zmq.PULL) as pull, zmq.Context.instance().socket(zmq.PUSH) as push:
        pull.bind(answers)
        push.connect(target.transfers.endpoints[0])
        for frames in ([msgspec.msgpack.encode(message)], [msgspec.msgpack.encode(message), metadata]):
            await asyncio.to_thread(push.send_multipart, frames)
        if refused:
            answer = msgspec.msgpack.decode(await asyncio.to_thread(pull.recv), type=KvTaken)
            assert not answer.ok
            target.transfers.handle(KvCancel(1))
        elif fields.get("transfer_id") == 9:
            answer = msgspec.msgpack.decode(await asyncio.to_thread(pull.recv), type=KvTaken)
            assert answer == KvTaken(9, 0, True)
            target.transfers.handle(KvCancel(1))
        assert not (await target.next()).ok
    assert not any(read.posted for read in net.reads)
    assert target.transfers.gauges()["kv_dropped"] >= 1
    assert all(torch.equal(layer, was) for layer, was in zip(target.cache.layers, before, strict=True))


async def test_answers_nobody_asked_for_change_nothing(make: Make, net: FakeNixl) -> None:
    source, target = make(net), make(net)
    net.fault = "hang"
    target.receive(1, [1])
    await target.next()
    source.send(1, [1], target)
    with zmq.Context.instance().socket(zmq.PUSH) as push:
        push.connect(source.transfers.endpoints[0])
        for answer in (KvTaken(1, 5, True), KvTaken(2, 0, True), KvTaken(1, -1, False)):
            await asyncio.to_thread(push.send, msgspec.msgpack.encode(answer))
        net.unstick()
        assert (await source.next()).ok
    assert (await target.next()).ok
    assert by_nixl(target) == 1


async def test_a_target_that_never_answers_is_given_up(
    make: Make, net: FakeNixl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offers, "ANSWER_S", 0.01)
    source = make(net)
    with zmq.Context.instance().socket(zmq.PULL) as silent:
        silent.bind(f"ipc://{tmp_path}/silent")
        source.transfers._sending.add(1)
        source.transfers._mover.send(1, [1], f"ipc://{tmp_path}/silent", nixl=True)  # type: ignore[union-attr]
        done = await source.next()
    assert (done.ok, done.detail) == (False, "what was offered is not answered")
