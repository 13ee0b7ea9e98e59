"""Pages that arrive: checked, then written into the pages the scheduler has named. Leaves the thread to the mover."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from services.gpu_worker.transfer.page_io import PageIO
from shared.messages.kv import KvChunk


class BadChunk(ValueError):
    """What came is not what was sent: its transfer has failed."""

    def __init__(self, transfer_id: int, text: str) -> None:
        super().__init__(text)
        self.transfer_id = transfer_id


@dataclass(slots=True)
class _Incoming:
    pages: list[int]
    received: int = 0
    takes_offers: bool = True


class Incoming:
    """The transfers that are awaited. Whatever belongs to none of them is counted and dropped.

    `cancel` may be called on any thread; once it has returned, no page of the transfer is written any more.
    """

    def __init__(self, pages: PageIO) -> None:
        self.dropped = 0
        self._pages = pages
        self._awaited: dict[int, _Incoming] = {}
        self._lock = threading.Lock()

    def expect(self, transfer_id: int, pages: list[int]) -> None:
        with self._lock:
            self._awaited[transfer_id] = _Incoming(pages)

    def cancel(self, transfer_id: int) -> bool:
        """Whether it was awaited."""
        with self._lock:
            return self._awaited.pop(transfer_id, None) is not None

    def cancel_all(self) -> list[int]:
        """Those that were awaited."""
        with self._lock:
            awaited = list(self._awaited)
            self._awaited.clear()
            return awaited

    def take(self, header: KvChunk, data: memoryview) -> tuple[int, int] | None:
        """(transfer, its pages) where this chunk was its last; raises BadChunk where the transfer is spoilt by it."""
        if header.transfer_id not in self._awaited:
            self.dropped += 1
            return None
        if zlib.crc32(data) != header.checksum:
            raise BadChunk(header.transfer_id, f"pages from {header.first} on have another checksum")
        return self._take(header, len(data), lambda pages: self._pages.write(pages, data))

    def take_staged(self, header: KvChunk, staged: torch.Tensor) -> tuple[int, int] | None:
        """As `take`, of what was read by NIXL and had the right checksum."""
        return self._take(header, staged.numel(), lambda pages: self._pages.unstage(pages, staged))

    def wants(self, offered: KvChunk) -> bool:
        """Whether these pages may be read. Raises BadChunk where they cannot be what is awaited."""
        with self._lock:
            awaited = self._awaited.get(offered.transfer_id)
            if awaited is None or not awaited.takes_offers:
                return False
            self._check_format(offered)
            if not 0 < offered.count <= len(awaited.pages):
                raise BadChunk(offered.transfer_id, f"{offered.count} pages are offered, {len(awaited.pages)} awaited")
            return True

    def refuse_offers(self, transfer_id: int) -> int:
        """What is still missing of it has to come by the socket: from this page of it on."""
        with self._lock:
            awaited = self._awaited.get(transfer_id)
            if awaited is None:
                return 0
            awaited.takes_offers = False
            return awaited.received

    def _take(self, header: KvChunk, size: int, write: Callable[[list[int]], None]) -> tuple[int, int] | None:
        with self._lock:
            awaited = self._awaited.get(header.transfer_id)
            if awaited is None:
                return None
            self._write(awaited, header, size, write)
            if awaited.received < len(awaited.pages):
                return None
            del self._awaited[header.transfer_id]
            return header.transfer_id, len(awaited.pages)

    def _write(self, awaited: _Incoming, header: KvChunk, size: int, write: Callable[[list[int]], None]) -> None:
        self._check_format(header)
        end = header.first + header.count
        in_order = header.first == awaited.received and header.count > 0 and end <= len(awaited.pages)
        if not in_order or size != header.count * self._pages.page_bytes:
            raise BadChunk(header.transfer_id, f"{size} bytes of pages {header.first} to {end}")
        if header.last != (end == len(awaited.pages)):
            raise BadChunk(
                header.transfer_id, f"{len(awaited.pages)} pages are awaited, the last one sent is {end - 1}"
            )
        try:
            write(awaited.pages[header.first : end])
        except (IndexError, RuntimeError) as error:
            raise BadChunk(header.transfer_id, str(error)) from error
        awaited.received = end

    def _check_format(self, header: KvChunk) -> None:
        if header.format != self._pages.format:
            raise BadChunk(header.transfer_id, f"pages of {header.format}, the cache here is {self._pages.format}")
