"""A sender's side of NIXL: pages are put where the target may read them. Leaves sockets to the mover.

pages --copied--> slot    KvOffer (with the agent's metadata) -> target, which reads it
                  slot free again                             <- KvTaken
"""

from __future__ import annotations

import time

import msgspec
import zmq

from services.gpu_worker.transfer.carrier import Carrier
from services.gpu_worker.transfer.outgoing import Offered, Outgoing
from services.gpu_worker.transfer.page_io import PageIO
from shared.messages.kv import KvChunk, KvOffer, KvTaken

ANSWER_S = 30.0
"""Longer than a target takes to read or to give up; the scheduler's own deadline mostly comes first."""
DOUBT_S = 60.0
"""So long pages go by the socket to a target with which NIXL has failed."""

_encoder = msgspec.msgpack.Encoder()


class Offers:
    """What lies ready for others. `endpoint`: where they answer."""

    def __init__(self, carrier: Carrier, pages: PageIO, endpoint: str) -> None:
        self.failed = 0
        self._carrier = carrier
        self._pages = pages
        self._endpoint = endpoint
        self._free = list(carrier.to_send)
        self._doubted: dict[str, float] = {}  # endpoint -> until when

    def are_for(self, endpoint: str) -> bool:
        """Whether a transfer to this target that begins now goes by NIXL."""
        until = self._doubted.get(endpoint)
        if until is not None and until <= time.monotonic():
            del self._doubted[endpoint]
            until = None
        return until is None and self._carrier.works

    def has_room(self) -> bool:
        return bool(self._free)

    def make(self, outgoing: Outgoing, socket: zmq.Socket[bytes]) -> bool:
        """Offer the next pages; False: the socket does not take it now, and nothing has happened.

        Raises IndexError and RuntimeError as PageIO does.
        """
        count = min(self._carrier.slot_bytes // self._pages.page_bytes, len(outgoing.pages) - outgoing.sent)
        first, slot = outgoing.sent, self._free[-1]
        staged = slot.memory[: count * self._pages.page_bytes]
        checksum = self._pages.stage(outgoing.pages[first : first + count], staged)
        last = first + count == len(outgoing.pages)
        chunk = KvChunk(outgoing.transfer_id, first, count, last, checksum, self._pages.format)
        carrier = self._carrier
        offer = KvOffer(chunk, carrier.name, carrier.memory, slot.address, carrier.device, self._endpoint)
        try:
            socket.send_multipart([_encoder.encode(offer), carrier.metadata], zmq.NOBLOCK)
        except zmq.Again:
            return False
        self._free.pop()
        outgoing.offered.append(Offered(first, slot, time.monotonic()))
        outgoing.sent += count
        return True

    def answered(self, outgoing: Outgoing, taken: KvTaken) -> bool:
        """False: this is no answer to what lies ready. After a refusal all that was not taken goes by the socket."""
        if not outgoing.offered or outgoing.offered[0].first != taken.first:
            return False
        if taken.ok:
            self._free.append(outgoing.offered.popleft().slot)
            return True
        outgoing.by_nixl, outgoing.sent = False, taken.first
        self.forget(outgoing)
        return True

    def forget(self, outgoing: Outgoing) -> None:
        """Nobody waits for its pages any more; a target that still reads finds another checksum."""
        if outgoing.offered:
            self.failed += 1
            self._doubted[outgoing.endpoint] = time.monotonic() + DOUBT_S
        while outgoing.offered:
            self._free.append(outgoing.offered.pop().slot)

    @staticmethod
    def overdue(outgoing: Outgoing) -> bool:
        return bool(outgoing.offered) and time.monotonic() - outgoing.offered[0].since > ANSWER_S
