"""A target's side of NIXL: what is offered is read beside the cache, then written as chunks are. Leaves sockets to
the mover.

KvOffer --> waits for a slot --> is read --> checksum, order --> pages      KvTaken(ok) --> source
                                    \\--> fails, takes too long --> KvTaken(not ok): the rest comes by the socket
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import structlog

from services.gpu_worker.transfer.carrier import Carrier, NixlFailed, Slot
from services.gpu_worker.transfer.incoming import BadChunk, Incoming
from services.gpu_worker.transfer.page_io import PageIO
from shared.messages.kv import KvOffer, KvTaken

READ_S = 5.0
"""A slot takes milliseconds on any network that is worth it, connecting included."""
MAX_WAITING = 256

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Read:
    offer: KvOffer
    slot: Slot
    handle: Any
    until: float


@dataclass(frozen=True, slots=True)
class Step:
    """What became of one offer: the answer to its source, and whether its transfer is done or spoilt by it."""

    answer_to: str
    answer: KvTaken
    done: tuple[int, int] | None = None  # as of Incoming.take
    spoilt: BadChunk | None = None


class Reads:
    """Offers in the order they came. A transfer's pages are written in their order, several transfers side by side."""

    def __init__(self, carrier: Carrier, pages: PageIO, incoming: Incoming) -> None:
        self.pages_read = 0
        self.failed = 0
        self._carrier = carrier
        self._pages = pages
        self._incoming = incoming
        self._free = list(carrier.to_read)
        self._waiting: deque[tuple[KvOffer, bytes]] = deque()
        self._under_way: list[_Read] = []
        self._given_up: list[_Read] = []  # and not over: the network may still write into their slots

    @property
    def active(self) -> bool:
        """Whether somebody has to call `turn` again soon."""
        return bool(self._under_way or self._waiting)

    def take(self, offer: KvOffer, metadata: bytes) -> bool:
        """False: nobody waits for it, or too much waits already. Raises BadChunk."""
        if not self._incoming.wants(offer.chunk) or len(self._waiting) >= MAX_WAITING:
            return False
        if offer.chunk.count * self._pages.page_bytes > self._carrier.slot_bytes:
            raise BadChunk(offer.chunk.transfer_id, f"no room for {offer.chunk.count} pages at once")
        self._waiting.append((offer, metadata))
        return True

    def turn(self) -> list[Step]:
        """Look at what is under way, and begin what waits; never waits itself."""
        for read in list(self._given_up):
            if self._carrier.state(read.handle) != "PROC":
                self._given_up.remove(read)
                self._end(read)
        steps = [step for read in list(self._under_way) if (step := self._look(read)) is not None]
        while self._waiting and self._free:
            step = self._begin(*self._waiting.popleft())
            if step is not None:
                steps.append(step)
        if not self._free and not self._under_way:  # every slot is lost to a read that does not end
            steps += [self._refuse(offer, "no memory is left") for offer, _ in self._waiting]
            self._waiting.clear()
        return steps

    def give_up(self) -> list[Step]:
        """Nobody waits for anything that was offered."""
        offers = [read.offer for read in self._under_way] + [offer for offer, _ in self._waiting]
        self._given_up += self._under_way
        self._under_way.clear()
        self._waiting.clear()
        return [let_go(offer) for offer in offers]

    def close(self) -> None:
        for read in self._under_way + self._given_up:
            self._carrier.release(read.handle)
        self._under_way.clear()
        self._given_up.clear()
        self._waiting.clear()

    def _begin(self, offer: KvOffer, metadata: bytes) -> Step | None:
        if not self._still_wanted(offer):
            return let_go(offer)
        try:
            handle = self._carrier.read(offer, metadata, self._size(offer), self._free[-1])
        except NixlFailed as error:
            return self._refuse(offer, str(error))
        self._under_way.append(_Read(offer, self._free.pop(), handle, time.monotonic() + READ_S))
        return None

    def _look(self, read: _Read) -> Step | None:
        if read not in self._under_way:
            return None
        if read is not self._first_of(read.offer):
            return None  # its turn comes after theirs
        state = self._carrier.state(read.handle)
        if state == "PROC" and time.monotonic() < read.until:
            return None
        self._under_way.remove(read)
        if state == "PROC":
            self._given_up.append(read)
            return self._refuse(read.offer, "the read took too long")
        self._end(read)
        if not self._still_wanted(read.offer):
            return let_go(read.offer)
        if state == "ERR":
            return self._refuse(read.offer, "the read failed")
        return self._write(read)

    def _end(self, read: _Read) -> None:
        self._carrier.release(read.handle)
        self._free.append(read.slot)

    def _write(self, read: _Read) -> Step:
        chunk, staged = read.offer.chunk, read.slot.memory[: self._size(read.offer)]
        try:
            if self._pages.checksum(staged) != chunk.checksum:
                return self._refuse(read.offer, "another checksum")
        except RuntimeError as error:
            return self._refuse(read.offer, str(error))
        answer = KvTaken(chunk.transfer_id, chunk.first, True)
        try:
            done = self._incoming.take_staged(chunk, staged)
        except BadChunk as error:
            return Step(read.offer.answer_to, answer, spoilt=error)
        self.pages_read += chunk.count
        return Step(read.offer.answer_to, answer, done)

    def _refuse(self, offer: KvOffer, why: str) -> Step:
        """The first that fails of a transfer answers for all that come after it."""
        self.failed += 1
        return refuse(self._incoming, offer, why)

    def _first_of(self, offer: KvOffer) -> _Read:
        wanted = offer.chunk.transfer_id
        return next(read for read in self._under_way if read.offer.chunk.transfer_id == wanted)

    def _still_wanted(self, offer: KvOffer) -> bool:
        try:
            return self._incoming.wants(offer.chunk)
        except BadChunk:
            return False

    def _size(self, offer: KvOffer) -> int:
        return offer.chunk.count * self._pages.page_bytes


def let_go(offer: KvOffer) -> Step:
    """What was cancelled meanwhile, or goes by the socket: the source may use its memory again."""
    return Step(offer.answer_to, KvTaken(offer.chunk.transfer_id, offer.chunk.first, True))


def refuse(incoming: Incoming, offer: KvOffer, why: str) -> Step:
    """From here on the transfer goes by the socket, with what was offered before these pages and is not there yet."""
    transfer_id = offer.chunk.transfer_id
    first = incoming.refuse_offers(transfer_id)
    log.warning("nixl: the rest comes by the socket", transfer_id=transfer_id, first=first, reason=why)
    return Step(offer.answer_to, KvTaken(transfer_id, first, False, why))
