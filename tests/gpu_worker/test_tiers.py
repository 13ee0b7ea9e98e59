"""Host memory and disk as tiers: bytes, checksums, lives, what a restart finds, what belongs to another model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from services.gpu_worker.compute import ComputeThread
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.tiers.disk import DiskTier, SpoiltFile
from services.gpu_worker.tiers.folder import Folder
from services.gpu_worker.tiers.plan import fingerprint, make_tiers
from services.gpu_worker.transfer.page_io import PageIO
from shared import ints
from shared.config import WorkerConfig
from shared.messages.kv import KvCancel, KvDone, KvEntry, KvInventory, KvLoad, KvStore, KvStored
from tests.local_peers import worker_hello

PAGE = 4


class Bench:
    """A cache of 32 pages with tiers for 8 and 16 pages."""

    def __init__(self, folder: Path, **hello: Any) -> None:
        self.cache = KVCache(3, 32, PAGE, 2, 8, torch.bfloat16, torch.device("cpu"))
        for layer in self.cache.layers:
            layer.normal_()
        self.news: asyncio.Queue[Any] = asyncio.Queue()
        pages = PageIO(self.cache)
        config = WorkerConfig(
            host_cache_gb=8 * pages.page_bytes / 1e9,
            disk_cache_gb=16 * (pages.page_bytes + 4096) / 1e9,
            disk_cache_dir=str(folder),
        )
        self.compute = ComputeThread()
        self.tiers = make_tiers(config, worker_hello(**hello), pages, self.compute, self.news.put_nowait)
        assert self.tiers.service is not None
        self.service = self.tiers.service
        self.service.begin(5)

    async def next(self) -> Any:
        return await asyncio.wait_for(self.news.get(), 20)

    async def inventory(self) -> list[KvEntry]:
        found: list[KvEntry] = []
        while True:
            message = await self.next()
            assert isinstance(message, KvInventory)
            found += message.entries
            if message.last:
                return found

    async def store(self, order: int, tier: Any, slots: list[int], pages: list[int], **fields: Any) -> None:
        more = {"source": "device", **fields}
        self.service.store(KvStore(order, tier, ints.pack(slots), pages=ints.pack(pages), **more))
        assert await self.next() == KvStored(order, 5, tier, ok=True)

    async def to_disk(self, order: int, slots: list[int], pages: list[int], parent: int = -1, **fields: Any) -> None:
        tokens = ints.pack(token for slot in slots for token in range(100 * slot, 100 * slot + PAGE))
        parents = ints.pack([parent, *slots[:-1]])
        await self.store(order, "disk", slots, pages, tokens=tokens, parents=parents, **fields)

    async def load(self, tier: Any, slots: list[int], pages: list[int]) -> KvDone:
        self.service.load(KvLoad(9, tier, ints.pack(slots), ints.pack(pages)))
        done = await self.next()
        assert isinstance(done, KvDone)
        return done

    def content(self, pages: list[int]) -> list[torch.Tensor]:
        return [layer[pages].clone() for layer in self.cache.layers]

    async def close(self) -> None:
        self.tiers.close()
        await self.compute.stop(5)


Make = Callable[..., Bench]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[Bench] = []

    def add(**fields: Any) -> Bench:
        made.append(Bench(tmp_path / "cache", **fields))
        return made[-1]

    yield add
    for bench in made:
        await bench.close()


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


async def test_pages_come_back_from_memory_and_disk_bit_by_bit(make: Make) -> None:
    bench = make()
    assert await bench.inventory() == []
    assert (bench.tiers.host_pages, bench.tiers.disk_pages) == (8, 16)
    before = bench.content([3, 1, 2])
    await bench.store(1, "host", [7, 0, 5], [3, 1, 2])
    await bench.to_disk(1, [4, 9, 2], [7, 0, 5], source="host")
    for layer in bench.cache.layers:
        layer.zero_()
    assert (await bench.load("host", [7, 0, 5], [20, 21, 22])).ok
    assert equal(bench.content([20, 21, 22]), before)
    assert (await bench.load("disk", [4, 9, 2], [10, 11, 12])).ok
    assert equal(bench.content([10, 11, 12]), before)
    assert all(not layer[:10].any() for layer in bench.cache.layers)


async def test_a_restart_finds_whole_paths_again(make: Make) -> None:
    bench = make()
    await bench.inventory()
    before = bench.content([1, 2, 3])
    await bench.to_disk(1, [4, 9], [1, 2], namespace=b"n")
    await bench.to_disk(2, [5], [3], parent=9, namespace=b"n")
    await bench.to_disk(3, [11], [3])
    await bench.to_disk(4, [12], [3], parent=11)
    await bench.to_disk(5, [11], [4])  # written anew: what followed the former one belongs to no path
    await bench.close()
    again = make()
    entries = await again.inventory()
    assert [(e.slot, e.parent, e.namespace) for e in entries if e.namespace] == [
        (4, -1, b"n"),
        (9, 4, b"n"),
        (5, 9, b"n"),
    ]
    assert [(e.slot, e.parent) for e in entries if not e.namespace] == [(11, -1)]
    assert ints.unpack(entries[0].tokens)[0] in (400, 1100)
    assert (await again.load("disk", [4, 9, 5], [20, 21, 22])).ok
    assert equal(again.content([20, 21, 22]), before)


async def test_another_model_or_format_finds_nothing(make: Make) -> None:
    bench = make()
    await bench.inventory()
    await bench.to_disk(1, [4], [1])
    await bench.close()
    other = make(model_digest="another")
    assert await other.inventory() == []
    assert not list(other.tiers.folder.path.glob("slot-*"))  # type: ignore[union-attr]
    names = ("model_digest", "kv_dtype", "kv_layout", "page_size", "kv_bytes_per_page")
    changed = {fingerprint(worker_hello(**{name: 77})) for name in names}
    assert len(changed | {fingerprint(worker_hello())}) == 6


async def test_two_workers_never_share_a_folder(make: Make) -> None:
    one, other = make(), make()
    assert one.tiers.folder is not None
    assert other.tiers.folder is not None
    assert one.tiers.folder.path != other.tiers.folder.path


@pytest.mark.parametrize("spoil", ["content", "short", "long", "gone", "header", "other"])
async def test_a_spoilt_file_is_never_believed(make: Make, spoil: str) -> None:
    bench = make()
    await bench.inventory()
    await bench.to_disk(1, [4, 6], [1, 2])
    assert bench.tiers.folder is not None
    file, other = (bench.tiers.folder.path / f"slot-{slot:07d}.kv" for slot in (4, 6))
    data = file.read_bytes()
    wrong = {
        "content": data[:-1] + bytes([data[-1] ^ 1]),
        "short": data[:-1],
        "long": data + b"x",
        "header": b"RFKV1" + b"\xff" * 40,
        "other": other.read_bytes(),
    }
    if spoil == "gone":
        file.unlink()
    else:
        file.write_bytes(wrong[spoil])
    before = bench.content([20])
    done = await bench.load("disk", [4], [20])
    assert not done.ok
    assert equal(bench.content([20]), before)
    await bench.close()
    again = make()
    slots = [entry.slot for entry in await again.inventory()]
    assert slots == ([4, 6] if spoil == "content" else [])  # contents are checked when they are read


async def test_nothing_is_written_to_the_device_after_a_cancel_or_in_another_life(make: Make) -> None:
    bench = make()
    await bench.inventory()
    await bench.store(1, "host", [0], [1])
    before = bench.content([20])
    gate = asyncio.Event()
    entered = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold() -> None:
        loop.call_soon_threadsafe(entered.set)
        asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(20)

    for number in (1, 2):
        entered.clear()
        gate.clear()
        bench.service._put(0, hold)
        await asyncio.wait_for(entered.wait(), 20)
        bench.service.load(KvLoad(number, "host", ints.pack([0]), ints.pack([20])))
        if number == 1:
            bench.service.cancel(1)
            assert await bench.next() == KvDone(1, 5, "received", ok=False, detail="cancelled")
        else:
            bench.service.end()
            bench.service.begin(6)
        gate.set()
    await bench.inventory()
    assert equal(bench.content([20]), before)
    bench.service.cancel(77)
    assert bench.news.empty()


async def test_what_cannot_be_done_is_said(make: Make) -> None:
    bench = make()
    await bench.inventory()
    bench.service.store(KvStore(1, "host", ints.pack([8]), "device", ints.pack([1])))
    assert not (await bench.next()).ok
    bench.service.store(KvStore(2, "host", ints.pack([0]), "device", ints.pack([99])))
    assert not (await bench.next()).ok
    bench.service.store(KvStore(1, "disk", ints.pack([16]), "device", ints.pack([1]), b"", bytes(16), ints.pack([-1])))
    assert not (await bench.next()).ok
    assert not (await bench.load("host", [9], [1])).ok
    assert not (await bench.load("disk", [3], [1])).ok


def test_a_folder_that_cannot_be_made_is_an_error_to_its_caller(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        Folder(str(tmp_path / "file"), "f")


def test_a_disk_tier_keeps_to_its_slots(tmp_path: Path) -> None:
    cache = PageIO(KVCache(1, 2, PAGE, 1, 4, torch.float32, torch.device("cpu")))
    disk = DiskTier(tmp_path, 2, cache.page_bytes)
    data = cache.read([0])[:, 0]
    with pytest.raises(IndexError):
        disk.put(2, -1, b"", b"", data)
    disk.put(1, -1, b"", b"", data)
    assert disk.get(1) == data.tobytes()
    (tmp_path / "slot-0000001.kv").write_bytes(msgspec.msgpack.encode(1))
    with pytest.raises(SpoiltFile):
        disk.get(1)
    assert KvCancel(1).transfer_id == 1
