"""The service: tokens in from the scheduler, text out to the tokenizers that said hello.

Streams are opened by the scheduler and closed by their last chunk. Leaves decoding to `request_stream`, slow or
absent frontends to `outbox`, and the life of the scheduler's connection to `scheduler_link`.

    scheduler --StreamOpen, TokenChunks--> Detokenizer --TextChunks--> tokenizer
        ^-----StopMatched, Heartbeat----------'  ^--------Hello-----------'
"""

from __future__ import annotations

import asyncio
import contextlib
import socket

import structlog

from services.detokenizer import vocabulary
from services.detokenizer.outbox import Outbox
from services.detokenizer.request_stream import MissingTokens, RequestStream
from services.detokenizer.scheduler_link import SchedulerLink
from shared import ints
from shared.clock import Clock, MonotonicClock
from shared.config import DetokenizerConfig
from shared.messages.control import Hello, Ping, Pong
from shared.messages.edges import TokenizerToDetokenizer
from shared.messages.stream import StopMatched, StreamOpen, TextChunk, TokenChunk, TokenChunks
from shared.service import new_service_id
from shared.transport import Frames, PeerBusy, PeerGone, Server

log = structlog.get_logger(__name__)

DRAIN_LIMIT_S = 2.0


class Detokenizer:
    """One life of the service."""

    def __init__(self, config: DetokenizerConfig, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or MonotonicClock()
        self.service_id = new_service_id("detokenizer", config)
        self.epoch = 0
        self.streams: dict[str, RequestStream] = {}
        self._messages = 0  # TokenChunks of this epoch and connection: the scheduler's measure of our backlog
        self._tokens = 0
        self._drained = asyncio.Event()
        self._resources = contextlib.ExitStack()

    async def start(self) -> None:
        """Load the vocabulary, bind for tokenizers, connect to the scheduler."""
        config = self._config
        self._vocabulary = await asyncio.to_thread(vocabulary.load, config.tokenizer_path or config.model_path)
        self._server: Server[TokenizerToDetokenizer] = Server(
            config.bind, TokenizerToDetokenizer, self._on_frontend, edge="text", peers=("tokenizer",)
        )
        self._resources.callback(self._server.close)
        self._server.on_writable = self._on_writable
        self._outbox = Outbox(self._server.send, self._clock)
        self.endpoint = config.advertise or _reachable(self._server.endpoint)
        self._link = SchedulerLink(
            config.scheduler, self.service_id, self.endpoint, self._on_scheduler, self._drop_streams
        )
        self._resources.callback(self._link.close)
        log.info("detokenizer started", endpoint=self.endpoint, token_table=bool(self._vocabulary.pieces))

    async def drain(self) -> None:
        """Hand over the text that is ready; streams that go on are opened again elsewhere."""
        self._outbox.retry()
        self._outbox.flush()
        if self._outbox.pending:
            try:
                async with asyncio.timeout(min(DRAIN_LIMIT_S, self._config.drain_timeout)):
                    await self._drained.wait()
            except TimeoutError:
                log.warning("text was not taken", chunks=self._outbox.pending)

    async def close(self) -> None:
        self._resources.close()

    def heartbeat(self) -> None:
        self._link.heartbeat(
            {
                "chunks_handled": float(self._messages),
                "tokens_total": float(self._tokens),
                "streams": float(len(self.streams)),
                "pending_chunks": float(self._outbox.pending),
                "malformed_total": float(self._link.malformed + self._server.malformed),
            }
        )
        self._outbox.retry()

    # Scheduler

    def _on_scheduler(self, message: StreamOpen | TokenChunks) -> None:
        if not self._is_current(message.epoch):
            return
        if isinstance(message, StreamOpen):
            self._open(message)
            return
        self._messages += 1
        for chunk in message.chunks:
            self._feed(chunk)
        self._outbox.flush()

    def _is_current(self, epoch: int) -> bool:
        """Whether a message is of the newest scheduler life; a newer one than known ends all before it."""
        if epoch > self.epoch:
            self.epoch = epoch
            self._drop_streams()
            self._link.forget_stops()
            self._outbox.clear(epoch)
        return epoch == self.epoch

    def _drop_streams(self) -> None:
        if self.streams:
            log.info("streams dropped, they will be opened again", streams=len(self.streams))
        self.streams.clear()
        self._outbox.drop_held()
        self._messages = 0

    def _open(self, opening: StreamOpen) -> None:
        stream = RequestStream(opening, self._vocabulary)
        self.streams[opening.request_id] = stream
        if opening.output_ids or opening.finish is not None:
            self._emit(stream, stream.reopen(opening))
            self._outbox.flush()

    def _feed(self, chunk: TokenChunk) -> None:
        stream = self.streams.get(chunk.request_id)
        if stream is None:
            return  # a stop string ended it, and the scheduler did not know yet
        try:
            text = stream.feed(chunk)
        except MissingTokens as error:
            log.error("tokens are missing", request_id=chunk.request_id, detail=str(error))
            self._link.renew()
            return
        if text is not None:
            self._emit(stream, text)

    def _emit(self, stream: RequestStream, text: TextChunk) -> None:
        self._tokens += ints.count(text.token_ids)
        finish = text.finish
        if finish is not None:
            del self.streams[text.request_id]
            if finish.matched_string:
                self._link.stop_matched(
                    StopMatched(text.request_id, text.num_output_tokens, finish.matched_string, self.epoch)
                )
        self._outbox.put(stream.frontend, text, stream.stream)

    # Tokenizers

    def _on_frontend(self, identity: bytes, message: TokenizerToDetokenizer, frames: Frames) -> None:
        match message:
            case Hello():
                self._answer(identity, Pong(0))
                self._outbox.retry(identity)
            case Ping():
                self._answer(identity, Pong(message.nonce))

    def _answer(self, identity: bytes, pong: Pong) -> None:
        with contextlib.suppress(PeerGone, PeerBusy):  # whoever still wants to know asks again
            self._server.send(identity, pong)

    def _on_writable(self) -> None:
        self._outbox.retry()
        if not self._outbox.pending:
            self._drained.set()


def _reachable(endpoint: str) -> str:
    """An endpoint bound to every interface, as others can reach it."""
    for everywhere in ("://0.0.0.0:", "://[::]:"):
        endpoint = endpoint.replace(everywhere, f"://{socket.gethostname()}:")
    return endpoint
