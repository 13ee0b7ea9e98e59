"""Pages between two workers' caches: bytes, checksums, cancelling, targets that do not read."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from services.gpu_worker.transfer import answers, mover, outgoing
from services.gpu_worker.transfer.address import bind_address
from services.gpu_worker.transfer.answers import Answers
from services.gpu_worker.transfer.outgoing import Sockets
from services.gpu_worker.transfer.page_io import PageIO
from shared import curve, ints
from shared.messages.kv import KvCancel, KvChunk, KvDone, KvReady, KvSend, KvTaken
from tests.gpu_worker.transfer_ends import End, Make, moved_each_way_at_once


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    ends: list[End] = []

    def add(**fields: Any) -> End:
        ends.append(End(fields.pop("endpoint", f"ipc://{tmp_path}/{len(ends)}"), **fields))
        return ends[-1]

    yield add
    for end in ends:
        end.close()


@pytest.mark.parametrize("endpoint", ["ipc", "tcp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_pages_arrive_bit_by_bit(
    make: Make, dtype: torch.dtype, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "CHUNK_BYTES", 4000)  # several chunks
    more = {"endpoint": "tcp://127.0.0.1:*"} if endpoint == "tcp" else {}
    source, target = make(dtype=dtype), make(dtype=dtype, **more)
    pages, into = list(range(40, 3, -2)), list(range(19))
    untouched = [layer[19:].clone() for layer in target.cache.layers]
    target.receive(1, into)
    assert await target.next() == KvReady(1, 7)
    source.send(1, pages, target)
    assert await source.next() == KvDone(1, 7, "sent", ok=True)
    assert await target.next() == KvDone(1, 7, "received", ok=True)
    for ours, theirs, kept in zip(target.cache.layers, source.cache.layers, untouched, strict=True):
        assert torch.equal(ours[into], theirs[pages])
        assert torch.equal(ours[19:], kept)
    assert target.transfers.gauges()["kv_pages_in"] == source.transfers.gauges()["kv_pages_out"] == 19


async def test_several_transfers_each_way_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outgoing, "CHUNK_BYTES", 3000)
    await moved_each_way_at_once(make(), make())


async def test_nothing_is_written_after_a_cancel(make: Make) -> None:
    source, target = make(), make()
    before = [layer.clone() for layer in target.cache.layers]
    target.receive(1, [1, 2, 3])
    await target.next()
    target.transfers.handle(KvCancel(1))
    done = await target.next()
    assert (done.side, done.ok) == ("received", False)
    source.send(1, [1, 2, 3], target)
    assert (await source.next()).ok
    target.receive(2, [9])  # comes after the pages of the cancelled one
    await target.next()
    source.send(2, [9], target)
    assert (await target.next()).ok
    for layer, was in zip(target.cache.layers, before, strict=True):
        assert torch.equal(layer[:9], was[:9])
    assert target.transfers.gauges()["kv_dropped"] == 1
    target.transfers.handle(KvCancel(2))
    target.transfers.handle(KvCancel(99))
    assert target.news.empty()


async def test_a_target_that_is_not_there_can_be_given_up(make: Make, tmp_path: Path) -> None:
    source, target = make(), make()
    source.transfers.handle(KvSend(1, ints.pack([1]), "b", (f"ipc://{tmp_path}/nobody",)))
    target.receive(2, [1])
    await target.next()
    source.send(2, [1], target)  # is not held up by the first
    assert (await target.next()).ok
    assert (await source.next()).transfer_id == 2
    source.transfers.handle(KvCancel(1))
    assert await source.next() == KvDone(1, 7, "sent", ok=False, detail="cancelled")


async def test_however_many_targets_are_not_there_each_is_called_once(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []
    monkeypatch.setattr(curve, "secure_client", lambda socket, endpoint, kind: called.append(endpoint))
    source = make()
    nobody = [f"ipc://{tmp_path}/nobody{number}" for number in range(outgoing.MAX_TARGETS + 8)]
    for number, endpoint in enumerate(nobody):
        source.transfers.handle(KvSend(number, ints.pack([1]), "b", (endpoint,)))
    late = make(endpoint=nobody[0])
    late.receive(0, [1])
    await late.next()
    assert (await late.next()).ok
    assert (await source.next()).transfer_id == 0
    assert called == nobody


def test_sockets_that_somebody_waits_for_stay_open(tmp_path: Path) -> None:
    sockets = Sockets(zmq.Context.instance())
    names = [f"ipc://{tmp_path}/{number}" for number in range(outgoing.MAX_TARGETS + 3)]
    opened = [sockets.to(name) for name in names]
    sockets.trim(set(opened))
    assert not any(socket.closed for socket in opened)
    sockets.trim({opened[1]})
    assert [socket.closed for socket in opened[:5]] == [True, False, True, True, False]
    assert not any(socket.closed for socket in opened[5:])
    assert sockets.to(names[1]) is opened[1]
    sockets.close()


def test_an_answer_that_nobody_takes_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sockets = Sockets(zmq.Context.instance())
    waiting = Answers(sockets)
    waiting.add(f"ipc://{tmp_path}/nobody", KvTaken(1, 0, True))
    assert waiting.send() == {sockets.to(f"ipc://{tmp_path}/nobody")}
    later = time.monotonic() + answers.ANSWER_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert waiting.send() == set()
    sockets.close()


@pytest.mark.parametrize(
    "spoil",
    [
        {"checksum": 1},
        {"first": 1},
        {"count": 2},
        {"last": False},
        {"first": -1},
        {"count": -1},
        {"count": 0},
        {"last": False, "count": 5},
        {"format": "float16"},
    ],
)
async def test_spoilt_chunks_fail_their_transfer_and_write_nothing(make: Make, spoil: dict[str, Any]) -> None:
    target = make()
    before = [layer.clone() for layer in target.cache.layers]
    target.receive(1, [5])
    await target.next()
    data = bytes(PageIO(target.cache).page_bytes)
    fields: dict[str, Any] = {"transfer_id": 1, "first": 0, "count": 1, "last": True, "checksum": zlib.crc32(data)}
    fields["format"] = "float32"
    header = msgspec.msgpack.encode(KvChunk(**{**fields, **spoil}))
    with zmq.Context.instance().socket(zmq.PUSH) as push:
        push.connect(target.transfers.endpoints[0])
        for frames in ([b"\xff\x00", b"x"], [b""], [header], [header, data]):
            await asyncio.to_thread(push.send_multipart, frames)
        done = await target.next()
    assert (done.side, done.ok) == ("received", False)
    assert all(torch.equal(layer, was) for layer, was in zip(target.cache.layers, before, strict=True))
    assert target.transfers.gauges()["kv_dropped"] == 3


async def test_unknown_pages_and_missing_endpoints_are_answered(make: Make) -> None:
    source, target = make(), make()
    source.send(1, [64], target)
    assert not (await source.next()).ok
    source.transfers.handle(KvSend(2, ints.pack([1]), "b", ()))
    assert not (await source.next()).ok
    target.receive(3, [64])
    await target.next()
    source.send(3, [1], target)
    assert (await source.next()).ok
    assert not (await target.next()).ok


async def test_without_an_endpoint_everything_is_refused() -> None:
    end = End("")
    assert end.transfers.endpoints == ()
    end.receive(1, [1])
    assert await end.next() == KvDone(1, 7, "received", ok=False, detail="this worker has no transfers")


@pytest.mark.parametrize("where", ["_receive", "_turn", "_send_one"])
async def test_what_nobody_foresaw_fails_what_is_under_way_and_not_what_comes_next(
    make: Make, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mover, "PAUSE_S", 0.001)
    source, target = make(), make()
    source.transfers.handle(KvSend(1, ints.pack([1]), "b", (f"ipc://{tmp_path}/nobody",)))
    source.receive(2, [1])
    assert await source.next() == KvReady(2, 7)
    thread = source.transfers._mover
    assert thread is not None
    real, faults = getattr(thread, where), [KeyError("no such thing")]

    def fail_once() -> Any:
        if faults:
            raise faults.pop()
        return real()

    monkeypatch.setattr(thread, where, fail_once)
    target.send(3, [1], source)  # something happens
    ends = [await source.next(), await source.next()]
    assert {(done.transfer_id, done.side, done.ok) for done in ends} == {(1, "sent", False), (2, "received", False)}
    assert all("no such thing" in done.detail for done in ends)
    assert "transfers failed" in capsys.readouterr().out
    assert (await target.next()).ok
    await moved_each_way_at_once(source, target)


async def test_a_thread_that_can_do_nothing_answers_all_the_same(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mover, "PAUSE_S", 0.001)
    source, target = make(), make()

    def broken() -> None:
        raise KeyError("no such thing")

    thread = source.transfers._mover
    assert thread is not None
    monkeypatch.setattr(thread, "_turn", broken)
    for transfer_id in (1, 2):
        source.send(transfer_id, [1], target)
        done = await source.next()
        assert (done.transfer_id, done.ok) == (transfer_id, False)
    source.receive(3, [1])
    assert await source.next() == KvReady(3, 7)
    assert (await source.next()).transfer_id == 3
    source.close()
    assert not thread._thread.is_alive()


async def test_a_new_life_hears_nothing_of_the_former_one(make: Make) -> None:
    source, target = make(), make()
    target.receive(1, [1])
    await target.next()
    source.send(1, [1], target)
    source.transfers.end()
    target.transfers.end()
    source.transfers.begin(8)
    target.transfers.begin(8)
    target.receive(2, [2])
    assert await target.next() == KvReady(2, 8)
    source.send(2, [2], target)
    assert await target.next() == KvDone(2, 8, "received", ok=True)
    assert await source.next() == KvDone(2, 8, "sent", ok=True)


def test_where_the_socket_is_bound(tmp_path: Path) -> None:
    assert bind_address("tcp://10.0.0.1:7000", "tcp://10.0.0.9:5560", "w") == "tcp://10.0.0.1:7000"
    assert bind_address("", "tcp://127.0.0.1:5560", "w") == "tcp://127.0.0.1:*"
    assert bind_address("", "ipc:///run/x/worker.sock", "w-1") == "ipc:///run/x/kv-w-1.sock"
    assert bind_address("", f"ipc:///{'x' * 100}/worker.sock", "w") == ""
    assert bind_address("", "inproc://scheduler", "w") == ""
