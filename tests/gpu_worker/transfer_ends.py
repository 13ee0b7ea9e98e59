"""A worker's cache with its transfers, for tests that put several of them side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch

from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.transfer.carrier import Carrier
from services.gpu_worker.transfer.page_io import PageIO
from services.gpu_worker.transfer.transfers import Transfers
from shared import ints
from shared.messages.kv import KvReady, KvReceive, KvSend

CPU = torch.device("cpu")


class End:
    """One worker's cache and transfers; `nixl`: a module that stands for NIXL's, or is it."""

    def __init__(
        self, endpoint: str, num_pages: int = 64, dtype: torch.dtype = torch.float32, nixl: Any = None
    ) -> None:
        self.cache = KVCache(3, num_pages, 4, 2, 8, dtype, CPU)
        for layer in self.cache.layers:
            layer.normal_()
        self._closed = False
        self.news: asyncio.Queue[Any] = asyncio.Queue()
        pages = PageIO(self.cache)
        carrier = None if nixl is None else Carrier(nixl, pages)
        self.transfers = Transfers(pages, endpoint, self.news.put_nowait, carrier)
        self.transfers.begin(7)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.transfers.end()
            self.transfers.close()

    async def next(self) -> Any:
        return await asyncio.wait_for(self.news.get(), 20)

    def receive(self, transfer_id: int, pages: list[int]) -> None:
        self.transfers.handle(KvReceive(transfer_id, ints.pack(pages), "a"))

    def send(self, transfer_id: int, pages: list[int], to: End) -> None:
        self.transfers.handle(KvSend(transfer_id, ints.pack(pages), "b", to.transfers.endpoints))


Make = Callable[..., End]


async def moved_each_way_at_once(one: End, other: End) -> None:
    """Four transfers of eight pages from each end to the other end well, bit by bit, and touch nothing else."""
    before = [layer.clone() for layer in one.cache.layers]
    theirs_before = [layer.clone() for layer in other.cache.layers]
    there = {number: list(range(8 * number, 8 * number + 8)) for number in range(4)}
    back = {number: list(range(8 * number, 8 * number + 8)) for number in range(4, 8)}
    for (number, pages), (returning, others) in zip(there.items(), back.items(), strict=True):
        other.receive(number, pages)
        one.receive(returning, others)
    for _ in there:
        assert isinstance(await one.next(), KvReady)
        assert isinstance(await other.next(), KvReady)
    for (number, pages), (returning, others) in zip(there.items(), back.items(), strict=True):
        one.send(number, pages, other)
        other.send(returning, others, one)
    for _ in range(8):
        assert (await one.next()).ok
        assert (await other.next()).ok
    for ours, theirs, was, theirs_were in zip(one.cache.layers, other.cache.layers, before, theirs_before, strict=True):
        assert torch.equal(ours[:32], was[:32])
        assert torch.equal(theirs[:32], was[:32])
        assert torch.equal(ours[32:], theirs_were[32:])
        assert torch.equal(theirs[32:], theirs_were[32:])
