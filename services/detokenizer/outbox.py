"""Text on its way to the frontends. What cannot leave is merged per request, so memory follows the tokens.

Leaves it to the detokenizer when to try again; only the scheduler declares a frontend dead.
"""

from __future__ import annotations

from collections.abc import Callable

from services.detokenizer import scores
from shared import ints
from shared.clock import Clock
from shared.messages.stream import TextChunk, TextChunks
from shared.transport import PeerBusy, PeerGone

FLUSH_TOKENS = 64  # a request that is not streamed is shown at this distance, so that a resume loses little
FORGET_S = 60.0  # a frontend's next life has another name, so text for one that stays away is never wanted
MAX_CHUNKS = 1024  # per message

Send = Callable[[bytes, TextChunks], None]


def merge(older: TextChunk, newer: TextChunk) -> TextChunk:
    """One chunk that says what both said, in this order."""
    if newer.reopened:
        return newer
    return TextChunk(
        older.request_id,
        older.offset,
        older.token_ids + newer.token_ids,
        older.text + newer.text,
        newer.finish,
        newer.num_output_tokens,
        newer.cached_tokens,
        scores.join(older.scores, newer.scores),
        newer.prompt_scores if older.prompt_scores is None else older.prompt_scores,
        newer.retractions,
        older.reopened,
    )


class _Mailbox:
    """What one frontend has not got yet, one chunk per request."""

    __slots__ = ("blocked", "held", "since", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[str, TextChunk] = {}
        self.held: dict[str, TextChunk] = {}  # not streamed and not long enough yet
        self.blocked = False
        self.since = 0.0


class Outbox:
    """Collects chunks, sends them when told to flush."""

    def __init__(self, send: Send, clock: Clock) -> None:
        self._send = send
        self._clock = clock
        self._boxes: dict[bytes, _Mailbox] = {}
        self.epoch = 0

    @property
    def pending(self) -> int:
        """Chunks that wait for a frontend."""
        return sum(len(box.waiting) for box in self._boxes.values())

    def put(self, frontend: bytes, chunk: TextChunk, stream: bool) -> None:
        box = self._boxes.get(frontend)
        if box is None:
            box = self._boxes[frontend] = _Mailbox()
        request_id = chunk.request_id
        if not stream:
            older = box.held.pop(request_id, None)
            chunk = chunk if older is None else merge(older, chunk)
            if chunk.finish is None and ints.count(chunk.token_ids) < FLUSH_TOKENS:
                box.held[request_id] = chunk
                return
        older = box.waiting.get(request_id)
        box.waiting[request_id] = chunk if older is None else merge(older, chunk)

    def flush(self) -> None:
        """Send what waits, except to frontends that could not take it last time."""
        for frontend in list(self._boxes):
            box = self._boxes[frontend]
            if not box.blocked:
                self._deliver(frontend, box)

    def retry(self, frontend: bytes | None = None) -> None:
        """Try again: for one frontend that has spoken, or for all."""
        now = self._clock.now()
        for name in [frontend] if frontend is not None else list(self._boxes):
            box = self._boxes.get(name)
            if box is None or not box.blocked:
                continue
            self._deliver(name, box)
            if box.blocked and now - box.since > FORGET_S:
                del self._boxes[name]

    def drop_held(self) -> None:
        """Forget what was not long enough to be sent: its streams are opened again, here or elsewhere."""
        for frontend, box in list(self._boxes.items()):
            box.held.clear()
            if not box.waiting:
                del self._boxes[frontend]

    def clear(self, epoch: int) -> None:
        """A new scheduler life: nothing of the old one may be sent."""
        self._boxes.clear()
        self.epoch = epoch

    def _deliver(self, frontend: bytes, box: _Mailbox) -> None:
        try:
            while box.waiting:
                ids = list(box.waiting)[:MAX_CHUNKS]
                self._send(frontend, TextChunks(tuple(box.waiting[i] for i in ids), self.epoch))
                for i in ids:
                    del box.waiting[i]
        except (PeerBusy, PeerGone):
            if not box.blocked:
                box.blocked = True
                box.since = self._clock.now()
            return
        box.blocked = False
        if not box.held:
            del self._boxes[frontend]
