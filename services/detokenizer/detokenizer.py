"""The service: tokens in from the scheduler, text out to the tokenizers that said hello.

Streams are opened by the scheduler and closed by their last chunk. Leaves decoding to `request_stream` and
slow or absent frontends to `outbox`.

    scheduler --StreamOpen, TokenChunks--> Detokenizer --TextChunks--> tokenizer
        ^-----StopMatched, Heartbeat----------'  ^--------Hello-----------'
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque

import structlog

from services.detokenizer import vocabulary
from services.detokenizer.outbox import Outbox
from services.detokenizer.request_stream import MissingTokens, RequestStream
from shared import ints
from shared.clock import Clock, MonotonicClock
from shared.config import DetokenizerConfig
from shared.messages.control import Heartbeat, Hello, Ping, Pong
from shared.messages.edges import ToDetokenizer, TokenizerToDetokenizer
from shared.messages.stream import StopMatched, StreamOpen, TextChunk, TokenChunk, TokenChunks
from shared.service import new_incarnation, new_service_id
from shared.transport import Client, Frames, PeerBusy, PeerGone, Server

log = structlog.get_logger(__name__)

HELLO_TRIES = 20  # quick ones after a connection broke; then one with every heartbeat
DRAIN_LIMIT_S = 2.0


class Detokenizer:
    """One life of the service."""

    def __init__(self, config: DetokenizerConfig, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or MonotonicClock()
        self.service_id = new_service_id("detokenizer", config)
        self.incarnation = new_incarnation()
        self.epoch = 0
        self.streams: dict[str, RequestStream] = {}
        self.chunks_handled = 0
        self._welcome = False
        self._hello_tries = HELLO_TRIES
        self._stops: deque[StopMatched] = deque()
        self._tokens = 0
        self._drained = asyncio.Event()
        self._resources = contextlib.ExitStack()

    async def start(self) -> None:
        """Load the vocabulary, bind for tokenizers, connect to the scheduler."""
        config = self._config
        path = config.tokenizer_path or config.model_path
        self._vocabulary = await asyncio.to_thread(vocabulary.load, path)
        self._server: Server[TokenizerToDetokenizer] = Server(config.bind, TokenizerToDetokenizer, self._on_frontend)
        self._resources.callback(self._server.close)
        self._server.on_writable = self._on_writable
        self._outbox = Outbox(self._server.send, self._clock)
        self.endpoint = config.advertise or _reachable(self._server.endpoint)
        identity = f"{self.service_id}/{self.incarnation}"
        self._client: Client[ToDetokenizer] = Client(config.scheduler, identity, ToDetokenizer, self._on_scheduler)
        self._resources.callback(self._client.close)
        self._client.on_writable = self._on_client_writable
        self._client.watch(self._on_disconnect)
        self._say_hello()
        log.info("detokenizer started", endpoint=self.endpoint, table=bool(self._vocabulary.pieces))

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
        if not self._welcome:
            self._say_hello()
        self._client.try_send(Heartbeat(self.service_id, self.incarnation, gauges=self._gauges()))
        self._outbox.retry()

    def _gauges(self) -> dict[str, float]:
        return {
            "chunks_handled": float(self.chunks_handled),
            "tokens_total": float(self._tokens),
            "streams": float(len(self.streams)),
            "pending_chunks": float(self._outbox.pending),
            "malformed": float(self._client.malformed + self._server.malformed),
        }

    # Scheduler

    def _say_hello(self) -> None:
        self._client.try_send(Hello("detokenizer", self.service_id, self.incarnation, self.endpoint))

    def _on_disconnect(self) -> None:
        self._welcome = False
        self._hello_tries = HELLO_TRIES
        self._say_hello()

    def _on_client_writable(self) -> None:
        """A send met no connection or a full queue a while ago."""
        self._send_stops()
        if not self._welcome and self._hello_tries > 0:
            self._hello_tries -= 1
            self._say_hello()

    def _on_scheduler(self, message: ToDetokenizer, frames: Frames) -> None:
        match message:
            case TokenChunks():
                if self._is_current(message.epoch):
                    for chunk in message.chunks:
                        self._feed(chunk)
                    self._outbox.flush()
            case StreamOpen():
                if self._is_current(message.epoch):
                    self._open(message)
            case Ping():
                self._client.try_send(Pong(message.nonce))
            case Pong():
                self._welcome = True

    def _is_current(self, epoch: int) -> bool:
        """Whether a message is of the newest scheduler life; a newer one than known ends all before it."""
        if epoch > self.epoch:
            if self.streams:
                log.info("new scheduler epoch, streams dropped", epoch=epoch, streams=len(self.streams))
            self.epoch = epoch
            self.streams.clear()
            self._stops.clear()
            self._outbox.clear(epoch)
        return epoch == self.epoch

    def _open(self, opening: StreamOpen) -> None:
        stream = RequestStream(opening, self._vocabulary)
        self.streams[opening.request_id] = stream
        self._outbox.forget(stream.frontend, opening.request_id)
        if opening.output_ids or opening.finish is not None:
            self._emit(stream, stream.reopen(opening))
            self._outbox.flush()

    def _feed(self, chunk: TokenChunk) -> None:
        self.chunks_handled += 1
        stream = self.streams.get(chunk.request_id)
        if stream is None:
            return  # a stop string ended it, and the scheduler did not know yet
        try:
            text = stream.feed(chunk)
        except MissingTokens as error:
            # A connection that broke may have lost messages; our hello makes the scheduler tell everything again.
            log.warning("tokens are missing, asking again", request_id=chunk.request_id, detail=str(error))
            del self.streams[chunk.request_id]
            if self._welcome:
                self._welcome = False
                self._say_hello()
            return
        if text is not None:
            self._emit(stream, text)

    def _emit(self, stream: RequestStream, text: TextChunk) -> None:
        self._tokens += ints.count(text.token_ids)
        finish = text.finish
        if finish is not None:
            del self.streams[text.request_id]
            if finish.matched_string:
                self._stops.append(
                    StopMatched(text.request_id, text.num_output_tokens, finish.matched_string, self.epoch)
                )
                self._send_stops()
        self._outbox.put(stream.frontend, text, stream.stream)

    def _send_stops(self) -> None:
        with contextlib.suppress(PeerBusy):  # on_writable comes back here
            while self._stops:
                self._client.send(self._stops[0])
                self._stops.popleft()

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
