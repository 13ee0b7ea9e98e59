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
    format: str = ""  # dtype, and for scaled values which scales


class KvOffer(Message, frozen=True, tag=52):
    """Instead of the bytes of `chunk`: they lie in memory that the target's NIXL agent may read.

    The next frame is the metadata of the source's agent. `chunk.checksum` is that of `transfer.staged`.
    """

    chunk: KvChunk
    agent: str
    memory: Literal["DRAM", "VRAM"]
    address: int
    device: int
    answer_to: str  # endpoint of the source's own socket


class KvTaken(Message, frozen=True, tag=53):
    """The answer to an offer: what lies there has been read, or the source has to send by the socket from here on."""

    transfer_id: int
    first: int
    ok: bool
    detail: str = ""


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


Tier = Literal["host", "disk"]


class KvStore(Message, frozen=True, tag=48):
    """Keep a copy of `pages`, which are about to be written again, in `slots` of a tier; done before any later command.

    For the disk, where the next life of the worker finds them: what they hold, and each one's predecessor.
    """

    order_id: int  # grows by one per tier
    tier: Tier
    slots: bytes  # int32
    source: Literal["device", "host"]
    pages: bytes  # int32: pages of the device, or slots of the host tier
    namespace: bytes = b""
    tokens: bytes = b""  # int32, all pages'
    parents: bytes = b""  # int32: slot of the page before; -1: none


class KvStored(Message, frozen=True, tag=49):
    """All orders of this tier up to this one are carried out, or `ok` is false and the tier is of no use any more."""

    order_id: int
    incarnation: int
    tier: Tier
    ok: bool
    detail: str = ""


class KvLoad(Message, frozen=True, tag=50):
    """Bring `slots` of a tier back into `pages`; answered by a KvDone "received"."""

    transfer_id: int
    tier: Tier
    slots: bytes  # int32
    pages: bytes  # int32


class KvEntry(Message, frozen=True):
    """One page that the disk tier still has from a former life (part of KvInventory)."""

    slot: int
    parent: int  # slot of the page before; -1: none
    namespace: bytes
    tokens: bytes  # int32


class KvInventory(Message, frozen=True, tag=51):
    """Once after each welcome, in pieces; parents come before their children."""

    incarnation: int
    entries: tuple[KvEntry, ...]
    last: bool


class KvCancel(Message, frozen=True, tag=46):
    """To both sides: each that is not through yet answers KvDone, not ok."""

    transfer_id: int
