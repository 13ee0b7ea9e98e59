"""Publishes KV event batches on a PUB socket, repeats recent ones on request. Leaves their content to `kv_events`.

    PUB     [topic] [sequence number, 8 bytes big endian] [EventBatch]
    ROUTER  a subscriber that missed something sends [] [first number, 8 bytes]; it gets [] [number] [EventBatch] for
            every batch from there on that is still known, then [] [-1] []

Never waits: a subscriber that does not keep up misses batches, sees the gap and asks.
"""

from __future__ import annotations

import contextlib
from collections import deque

import msgspec
import structlog
import zmq

from services.scheduler.kv_events import EventBatch
from shared.transport import Frames, PeerBusy, PeerGone, RawServer

log = structlog.get_logger(__name__)

HIGH_WATER_MARK = 100_000
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)


class KvPublisher:
    def __init__(self, endpoint: str, replay_endpoint: str, topic: str, buffer_batches: int) -> None:
        self._topic = topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._next = 0
        self._recent: deque[tuple[int, bytes]] = deque(maxlen=buffer_batches)
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)
        self.endpoint: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._replay = RawServer(replay_endpoint, self._on_request) if replay_endpoint else None
        self.replay_endpoint = self._replay.endpoint if self._replay else ""
        if endpoint.startswith("tcp://"):
            log.warning("KV events carry the tokens of every prompt, in the clear", endpoint=self.endpoint)

    def publish(self, batch: EventBatch) -> None:
        number, payload = self._next, self._encoder.encode(batch)
        self._next += 1
        self._recent.append((number, payload))
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart((self._topic, number.to_bytes(NUMBER_BYTES, "big"), payload), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()
        if self._replay is not None:
            self._replay.close()

    def _on_request(self, identity: bytes, frames: Frames) -> None:
        if len(frames[-1]) != NUMBER_BYTES or self._replay is None:
            return
        first = int.from_bytes(frames[-1], "big")
        with contextlib.suppress(PeerGone, PeerBusy):  # it will see the gap and ask again
            for number, payload in self._recent:
                if number >= first:
                    self._replay.send_frames(identity, b"", number.to_bytes(NUMBER_BYTES, "big"), payload)
            self._replay.send_frames(identity, b"", END, b"")
