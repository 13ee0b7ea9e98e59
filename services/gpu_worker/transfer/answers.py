"""Answers to offers on their way back, each to the socket its offer named. Leaves waiting for sockets to the mover."""

from __future__ import annotations

import time
from collections import deque

import msgspec
import structlog
import zmq

from services.gpu_worker.transfer.offers import ANSWER_S
from services.gpu_worker.transfer.outgoing import Sockets, takes_now
from shared import curve
from shared.messages.kv import KvTaken

MAX_WAITING = 256
"""Beyond them the oldest is lost, as is one that cannot be sent for ANSWER_S: its source waits no longer."""

log = structlog.get_logger(__name__)


class Answers:
    def __init__(self, sockets: Sockets) -> None:
        self._sockets = sockets
        self._waiting: deque[tuple[float, str, KvTaken]] = deque(maxlen=MAX_WAITING)
        self._encoder = msgspec.msgpack.Encoder()

    def add(self, endpoint: str, taken: KvTaken) -> None:
        self._waiting.append((time.monotonic() + ANSWER_S, endpoint, taken))

    def send(self) -> set[zmq.Socket[bytes]]:
        """Those that can go now; the sockets that the others wait for. Answers to one endpoint stay in order."""
        full: set[zmq.Socket[bytes]] = set()
        for _ in range(len(self._waiting)):
            until, endpoint, taken = self._waiting.popleft()
            if until <= time.monotonic():
                continue
            try:
                socket = self._sockets.to(endpoint)
                if socket in full or not self._send(socket, taken):
                    full.add(socket)
                    self._waiting.append((until, endpoint, taken))
            except (zmq.ZMQError, curve.KeysUnusable) as error:
                log.warning("nixl: cannot answer", endpoint=endpoint, reason=str(error))
        return full

    def _send(self, socket: zmq.Socket[bytes], taken: KvTaken) -> bool:
        if not takes_now(socket):
            return False
        try:
            socket.send(self._encoder.encode(taken), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
