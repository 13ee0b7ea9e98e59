"""Pages that arrive: checked, then written into the pages the scheduler has named. Leaves the thread to the mover."""

from __future__ import annotations

import threading
import zlib
from dataclasses import dataclass

import msgspec

from services.gpu_worker.transfer.page_io import PageIO
from shared.messages.edges import WorkerToWorker
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


class Incoming:
    """The transfers that are awaited. Whatever belongs to none of them is counted and dropped.

    `cancel` may be called on any thread; once it has returned, no page of the transfer is written any more.
    """

    def __init__(self, pages: PageIO) -> None:
        self.dropped = 0
        self._pages = pages
        self._awaited: dict[int, _Incoming] = {}
        self._lock = threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(WorkerToWorker)

    def expect(self, transfer_id: int, pages: list[int]) -> None:
        with self._lock:
            self._awaited[transfer_id] = _Incoming(pages)

    def cancel(self, transfer_id: int) -> bool:
        """Whether it was awaited."""
        with self._lock:
            return self._awaited.pop(transfer_id, None) is not None

    def cancel_all(self) -> None:
        with self._lock:
            self._awaited.clear()

    def take(self, frames: list[memoryview]) -> tuple[int, int] | None:
        """(transfer, its pages) where this chunk was its last; raises BadChunk where the transfer is spoilt by it."""
        header = self._header(frames)
        if header is None or header.transfer_id not in self._awaited:
            self.dropped += 1
            return None
        if zlib.crc32(frames[1]) != header.checksum:
            raise BadChunk(header.transfer_id, f"pages from {header.first} on have another checksum")
        with self._lock:
            awaited = self._awaited.get(header.transfer_id)
            if awaited is None:
                return None
            self._write(awaited, header, frames[1])
            if awaited.received < len(awaited.pages):
                return None
            del self._awaited[header.transfer_id]
            return header.transfer_id, len(awaited.pages)

    def _header(self, frames: list[memoryview]) -> KvChunk | None:
        if len(frames) != 2:
            return None
        try:
            return self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None

    def _write(self, awaited: _Incoming, header: KvChunk, data: memoryview) -> None:
        if header.format != self._pages.format:
            raise BadChunk(header.transfer_id, f"pages of {header.format}, the cache here is {self._pages.format}")
        end = header.first + header.count
        in_order = header.first == awaited.received and header.count > 0 and end <= len(awaited.pages)
        if not in_order or len(data) != header.count * self._pages.page_bytes:
            raise BadChunk(header.transfer_id, f"{len(data)} bytes of pages {header.first} to {end}")
        if header.last != (end == len(awaited.pages)):
            raise BadChunk(
                header.transfer_id, f"{len(awaited.pages)} pages are awaited, the last one sent is {end - 1}"
            )
        try:
            self._pages.write(awaited.pages[header.first : end], data)
        except (IndexError, RuntimeError) as error:
            raise BadChunk(header.transfer_id, str(error)) from error
        awaited.received = end
