"""The tier on disk: one file per page, written atomically, checked when read. Leaves threads and orders to the service.

    "RFKV1" | length of header, 4 bytes | header (msgpack) | the page's bytes, layer after layer

A file names the stamp of its predecessor's file, so one whose predecessor was written anew belongs to no path any more.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from services.gpu_worker.transfer.page_io import Bytes
from shared.messages.kv import KvEntry

MAGIC = b"RFKV1"
MAX_HEADER_BYTES = 1 << 20


class SpoiltFile(ValueError):
    """A file is not what was written."""


class Header(msgspec.Struct, frozen=True, array_like=True):
    slot: int
    parent: int
    stamp: int
    parent_stamp: int
    namespace: bytes
    tokens: bytes
    num_bytes: int
    checksum: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


class DiskTier:
    """For one thread. `page_bytes` are those of one page over all layers."""

    def __init__(self, folder: Path, num_slots: int, page_bytes: int) -> None:
        self.num_slots = num_slots
        self._folder = folder
        self._page_bytes = page_bytes
        self._stamps: dict[int, int] = {}  # of the files that are there

    def put(self, slot: int, parent: int, namespace: bytes, tokens: bytes, data: Bytes) -> None:
        """One page, uint8 [layers, bytes]. Raises OSError, IndexError."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} is not in the disk tier")
        content = np.ascontiguousarray(data).reshape(-1).data
        stamp = secrets.randbits(62)
        checksum = zlib.crc32(content)
        parent_stamp = self._stamps.get(parent, 0)
        header = _encoder.encode(Header(slot, parent, stamp, parent_stamp, namespace, tokens, len(content), checksum))
        self._stamps.pop(slot, None)
        part = self._folder / "part"
        with part.open("wb") as file:
            file.write(MAGIC + len(header).to_bytes(4, "little") + header)
            file.write(content)
        os.replace(part, self._path(slot))
        self._stamps[slot] = stamp

    def get(self, slot: int) -> bytes:
        """The page, layer after layer. Raises OSError, SpoiltFile."""
        path = self._path(slot)
        header, offset = _read_header(path)
        with path.open("rb") as file:
            file.seek(offset)
            content = file.read(self._page_bytes + 1)
        if len(content) != self._page_bytes or zlib.crc32(content) != header.checksum:
            raise SpoiltFile(f"{path.name} has another checksum")
        if header.slot != slot or header.stamp != self._stamps.get(slot):
            raise SpoiltFile(f"{path.name} is another page's")
        return content

    def entries(self) -> Iterator[KvEntry]:
        """What a former life has left, parents before their children; files that belong to nothing are left out."""
        found: dict[int, Header] = {}
        for path in self._folder.glob("slot-*.kv"):
            try:
                header, size = _read_header(path)
            except (OSError, SpoiltFile):
                continue
            complete = path.stat().st_size == size + self._page_bytes and header.num_bytes == self._page_bytes
            if complete and 0 <= header.slot < self.num_slots and path == self._path(header.slot):
                found[header.slot] = header
        children: dict[int, list[Header]] = {}
        for header in found.values():
            parent = found.get(header.parent)
            if header.parent == -1 or (parent is not None and parent.stamp == header.parent_stamp):
                children.setdefault(header.parent, []).append(header)
        ready = children.pop(-1, [])
        while ready:
            header = ready.pop()
            self._stamps[header.slot] = header.stamp
            yield KvEntry(header.slot, header.parent, header.namespace, header.tokens)
            ready += children.pop(header.slot, [])

    def _path(self, slot: int) -> Path:
        return self._folder / f"slot-{slot:07d}.kv"


def _read_header(path: Path) -> tuple[Header, int]:
    """The header and where the page begins. Raises OSError, SpoiltFile."""
    with path.open("rb") as file:
        start = file.read(len(MAGIC) + 4)
        size = int.from_bytes(start[len(MAGIC) :], "little")
        if not start.startswith(MAGIC) or len(start) != len(MAGIC) + 4 or size > MAX_HEADER_BYTES:
            raise SpoiltFile(f"{path.name} is not a page")
        try:
            header = _decoder.decode(file.read(size))
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SpoiltFile(f"{path.name}: {error}") from None
    return header, len(start) + size
