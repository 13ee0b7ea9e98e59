"""KV pages on the move, worker to worker. The scheduler starts transfers; correctness never depends on one."""

from __future__ import annotations

from typing import Literal

from shared.messages.base import Message


class KvSend(Message, frozen=True, tag=40):
    transfer_id: int
    pages: bytes  # int32
    target_id: str
    target_endpoints: tuple[str, ...]


class KvReceive(Message, frozen=True, tag=41):
    """Goes to the target first; the source hears of the transfer when the target is ready."""

    transfer_id: int
    pages: bytes  # int32
    source_id: str


class KvChunk(Message, frozen=True, tag=42):
    """Header; the bytes of pages `first` .. `first + count - 1` of the transfer ride in the next frame."""

    transfer_id: int
    first: int
    count: int
    last: bool
    checksum: int


class KvReady(Message, frozen=True, tag=47):
    """The target awaits the pages of this transfer: they may be sent."""

    transfer_id: int
    incarnation: int


class KvDone(Message, frozen=True, tag=43):
    """One side is through, well or not: it neither reads nor writes pages of this transfer any more."""

    transfer_id: int
    incarnation: int
    side: Literal["sent", "received"]
    ok: bool
    detail: str = ""


class KvCancel(Message, frozen=True, tag=46):
    """To both sides: each that is not through yet answers KvDone, not ok."""

    transfer_id: int
