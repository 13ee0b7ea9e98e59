"""The frontend edge: which tokenizers are there, what they are told. Leaves requests to the lifecycle."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import structlog

from services.scheduler.edge import Edge, split_identity
from shared.clock import Clock
from shared.messages.control import Heartbeat, Ping
from shared.messages.request import SystemStatus
from shared.transport import PeerBusy, PeerGone

log = structlog.get_logger(__name__)

GONE_GRACE_S = 2.0
"""A broken connection may come back under the same identity within this time."""


class Tokenizer:
    def __init__(self, identity: bytes, now: float) -> None:
        self.identity = identity
        self.service_id, self.incarnation = split_identity(identity)
        self.greeted = False
        self.last_heard = now
        self.gone_since = 0.0  # 0: connected
        self.heartbeat: Heartbeat | None = None


class Frontends:
    """`on_lost(identity)` is called once for a tokenizer that will not come back: nobody waits for its requests."""

    def __init__(self, edge: Edge, heartbeat_timeout: float, clock: Clock, on_lost: Callable[[bytes], None]) -> None:
        self.tokenizers: dict[bytes, Tokenizer] = {}
        self._edge = edge
        self._heartbeat_timeout = heartbeat_timeout
        self._clock = clock
        self._on_lost = on_lost

    def heard(self, identity: bytes) -> Tokenizer | None:
        """Something came from a tokenizer; None where a later life of it is known: then it means nothing."""
        now = self._clock.now()
        tokenizer = self.tokenizers.get(identity)
        if tokenizer is not None:
            tokenizer.last_heard = now
            tokenizer.gone_since = 0.0
            return tokenizer
        service_id, incarnation = split_identity(identity)
        for other in [t for t in self.tokenizers.values() if t.service_id == service_id]:
            if other.incarnation > incarnation:
                return None
            self._lose(other, "has a new incarnation")
        tokenizer = self.tokenizers[identity] = Tokenizer(identity, now)
        log.info("tokenizer joined", tokenizer=identity.decode(errors="replace"))
        return tokenizer

    def heartbeat(self, identity: bytes, message: Heartbeat) -> None:
        tokenizer = self.tokenizers.get(identity)
        if tokenizer is not None:
            tokenizer.heartbeat = message

    def send(self, identity: bytes, message: msgspec.Struct) -> None:
        """What cannot be delivered is dropped: whoever is gone has nobody waiting, whoever is stuck asks again."""
        try:
            self._edge.send(identity, message)
        except PeerGone:
            self._mark_gone(identity)
        except PeerBusy:
            log.warning("tokenizer does not read its messages", tokenizer=identity.decode(errors="replace"))

    def broadcast(self, status: SystemStatus) -> None:
        for identity in list(self.tokenizers):
            self.send(identity, status)

    def probe(self) -> None:
        """Some connection has broken: find out whose."""
        for identity in list(self.tokenizers):
            self.send(identity, Ping(0))

    def check_silence(self) -> None:
        now = self._clock.now()
        for tokenizer in list(self.tokenizers.values()):
            if now - tokenizer.last_heard > self._heartbeat_timeout:
                self._lose(tokenizer, f"silent for {now - tokenizer.last_heard:.1f} s")
            elif tokenizer.gone_since and now - tokenizer.gone_since > GONE_GRACE_S:
                self._lose(tokenizer, "connection lost")

    def _mark_gone(self, identity: bytes) -> None:
        tokenizer = self.tokenizers.get(identity)
        if tokenizer is not None and not tokenizer.gone_since:
            tokenizer.gone_since = self._clock.now()

    def _lose(self, tokenizer: Tokenizer, reason: str) -> None:
        log.warning("tokenizer lost", tokenizer=tokenizer.identity.decode(errors="replace"), reason=reason)
        del self.tokenizers[tokenizer.identity]
        self._on_lost(tokenizer.identity)
