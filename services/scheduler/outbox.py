"""The stream edge: every token to the detokenizer of its request, once, in batches. Leaves text to the detokenizers."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable

import structlog

from services.scheduler.edge import Edge
from services.scheduler.metrics import Metrics
from services.scheduler.request import Request
from shared import ints
from shared.clock import Clock
from shared.messages.control import Heartbeat, Hello, Ping, Pong
from shared.messages.stream import StreamOpen, TokenChunk, TokenChunks
from shared.transport import PeerBusy, PeerGone

log = structlog.get_logger(__name__)

# Once per token: no time for the checks of ints.pack.
_pack: Callable[[array[int]], bytes] = array.tobytes if sys.byteorder == "little" else ints.pack

PROMPT_TAIL_TOKENS = 16
MAX_BACKLOG = 1000
"""TokenChunks a detokenizer may be behind; beyond it tokens wait here, where they merge."""


class Detokenizer:
    def __init__(self, identity: bytes, hello: Hello, now: float) -> None:
        self.identity = identity
        self.key = identity.decode()
        self.service_id = hello.service_id
        self.incarnation = hello.incarnation
        self.endpoint = hello.endpoint
        self.last_heard = now
        self.heartbeat: Heartbeat | None = None
        self.num_streams = 0
        self.chunks_sent = 0

    @property
    def backlog(self) -> float:
        """Messages sent and not handled, as far as the last heartbeat knows; 0 where it does not say."""
        handled = self.heartbeat.gauges.get("chunks_handled") if self.heartbeat else None
        return 0 if handled is None else self.chunks_sent - handled


class Outbox:
    """A touched request is sent with the next flush: its stream is opened, or its new tokens go out as one chunk."""

    def __init__(self, edge: Edge, epoch: int, metrics: Metrics, clock: Clock) -> None:
        self.detokenizers: dict[bytes, Detokenizer] = {}
        self.touched: list[Request] = []
        self.broken: list[Request] = []  # whose chunk could not be built: they must end
        self._edge = edge
        self._epoch = epoch
        self._metrics = metrics
        self._clock = clock

    def touch(self, request: Request) -> None:
        if not request.dirty:
            request.dirty = True
            self.touched.append(request)

    def hello(self, identity: bytes, message: Hello, streams: Iterable[Request]) -> None:
        """A detokenizer is there: streams that nobody decodes go to it."""
        known = self.detokenizers.get(identity)
        if known is None:
            former = [d for d in self.detokenizers.values() if d.service_id == message.service_id]
            if any(other.incarnation > message.incarnation for other in former):
                return
            for other in former:
                self.lose(other, streams, "has a new incarnation")
            self.detokenizers[identity] = Detokenizer(identity, message, self._clock.now())
            log.info("detokenizer joined", detokenizer=identity.decode(), endpoint=message.endpoint)
            for request in streams:
                if request.detokenizer is None:
                    self.touch(request)
        else:
            known.endpoint = message.endpoint
        self.send_to(identity, Pong(0))

    def heartbeat(self, identity: bytes, message: Heartbeat) -> None:
        detokenizer = self.detokenizers.get(identity)
        if detokenizer is None:
            # The sender lived before this scheduler did, or was given up; its endpoint is not known.
            self.send_to(identity, Pong(0, healthy=False, detail="unknown: say hello"))
            return
        detokenizer.last_heard = self._clock.now()
        detokenizer.heartbeat = message

    def lose(self, detokenizer: Detokenizer, streams: Iterable[Request], reason: str) -> None:
        """Its streams are opened again at another one, or at the next that comes."""
        if self.detokenizers.pop(detokenizer.identity, None) is None:
            return
        log.warning("detokenizer lost", detokenizer=detokenizer.key, reason=reason)
        self._metrics.count("detokenizers_lost")
        for request in streams:
            if request.detokenizer is detokenizer:
                self.reopen(request)

    def probe(self) -> list[Detokenizer]:
        """Those whose connection is gone."""
        return [d for d in list(self.detokenizers.values()) if not self.send_to(d.identity, Ping(0))]

    def reopen(self, request: Request) -> None:
        """Say everything about it once more."""
        self._detach(request)
        self.touch(request)

    def forget(self, request: Request) -> None:
        self._detach(request)
        request.opened = True  # there is nothing to open any more

    def _detach(self, request: Request) -> None:
        if request.detokenizer is not None:
            request.detokenizer.num_streams -= 1
        request.detokenizer = None
        request.opened = request.told = False
        request.sent = 0

    def flush(self) -> list[Detokenizer]:
        """Send what was touched; returns the detokenizers that turned out to be gone."""
        if not self.touched or not self.detokenizers:
            return []
        touched, self.touched = self.touched, []
        full = {d for d in self.detokenizers.values() if d.backlog > MAX_BACKLOG}
        batches: dict[Detokenizer, list[Request]] = {d: [] for d in self.detokenizers.values()}
        gone: list[Detokenizer] = []
        for request in touched:
            detokenizer = request.detokenizer
            if not request.opened:
                self._open(request, gone)
            elif detokenizer is None or request.told:
                request.dirty = False
            elif full and detokenizer in full:
                self.touched.append(request)
            elif len(request.output) > request.sent or request.finish is not None:
                batches[detokenizer].append(request)
            else:
                request.dirty = False  # nothing new
        for detokenizer, requests in batches.items():
            if requests:
                self._send_chunks(detokenizer, requests, gone)
        return gone

    def _open(self, request: Request, gone: list[Detokenizer]) -> None:
        candidates = [d for d in self.detokenizers.values() if d not in gone]
        if not candidates:
            self.touched.append(request)
            return
        detokenizer = min(candidates, key=lambda d: (d.num_streams, d.key))
        try:
            opening = self._stream_open(request)
        except Exception:
            self._give_up(request)
            self.touched.append(request)
            return
        if not self._try(detokenizer, opening, gone):
            self.touched.append(request)
            return
        request.detokenizer = detokenizer
        detokenizer.num_streams += 1
        request.opened = True
        request.sent = len(request.output)
        request.told = request.finish is not None
        request.prompt_scores_sent = opening.prompt_scores is not None
        request.dirty = False

    def _send_chunks(self, detokenizer: Detokenizer, requests: list[Request], gone: list[Detokenizer]) -> None:
        try:
            chunks = tuple(map(_chunk, requests))
        except Exception:
            self._sort_out(requests)
            return
        if self._try(detokenizer, TokenChunks(chunks, self._epoch), gone):
            detokenizer.chunks_sent += 1
            for request, chunk in zip(requests, chunks, strict=True):
                request.sent = len(request.output)
                request.told = request.finish is not None
                request.prompt_scores_sent |= chunk.prompt_scores is not None
                request.dirty = False
        else:
            self.touched.extend(requests)

    def _sort_out(self, requests: list[Request]) -> None:
        """One of them cannot be sent as it is; the others go with the next flush."""
        for request in requests:
            try:
                _chunk(request)
            except Exception:
                self._give_up(request)
        self.touched.extend(requests)

    def _give_up(self, request: Request) -> None:
        self._metrics.count("internal_errors")
        log.exception("message failed", request_id=request.request_id)
        if request.finish is not None and request.plain:
            request.opened = request.told = True  # not even its end can be said
        request.drop_scores()
        self.broken.append(request)

    def _try(self, detokenizer: Detokenizer, message: StreamOpen | TokenChunks, gone: list[Detokenizer]) -> bool:
        try:
            self._edge.send(detokenizer.identity, message)
        except PeerBusy:
            return False  # merged and sent again once there is room; heartbeats declare death
        except PeerGone:
            if detokenizer not in gone:
                gone.append(detokenizer)
            return False
        return True

    def send_to(self, identity: bytes, message: Ping | Pong) -> bool:
        try:
            self._edge.send(identity, message)
        except PeerBusy:
            return True
        except PeerGone:
            return False
        return True

    def _stream_open(self, request: Request) -> StreamOpen:
        message = request.message
        count = len(request.output)
        return StreamOpen(
            request_id=request.request_id,
            frontend_id=request.frontend.decode(),
            prompt_tail=message.prompt_ids[-ints.ITEM_BYTES * PROMPT_TAIL_TOKENS :],
            output_ids=ints.pack(request.output),
            stop_strings=message.stop_strings,
            stop_regex=message.stop_regex,
            no_stop_trim=message.no_stop_trim,
            skip_special_tokens=message.skip_special_tokens,
            spaces_between_special_tokens=message.spaces_between_special_tokens,
            stream=message.stream,
            epoch=self._epoch,
            finish=request.finish,
            cached_tokens=request.cached_tokens,
            scores=request.scores.everything(count),
            prompt_scores=request.complete_prompt_scores(),
        )


def _chunk(request: Request) -> TokenChunk:
    sent = request.sent
    ids = _pack(request.output[sent:])
    finish, cached, retractions = request.finish, request.cached_tokens, request.retractions
    if request.plain:
        return TokenChunk(request.request_id, sent, ids, finish, cached, None, None, retractions)
    prompt_scores = None if request.prompt_scores_sent else request.complete_prompt_scores()
    scores = request.scores.since(sent, len(request.output))
    return TokenChunk(request.request_id, sent, ids, finish, cached, scores, prompt_scores, retractions)
