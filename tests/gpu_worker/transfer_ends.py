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
from shared.messages.kv import KvReceive, KvSend

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
