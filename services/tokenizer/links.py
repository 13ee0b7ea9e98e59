"""One connection per living detokenizer, introduced until it is answered; leaves the text to its receiver."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog

from shared.clock import Clock
from shared.messages.control import Hello, Pong
from shared.messages.edges import DetokenizerToTokenizer
from shared.messages.stream import TextChunks
from shared.transport import Client

log = structlog.get_logger(__name__)

INTRODUCTION_S = 3.0


class _Link:
    """One detokenizer life."""

    def __init__(
        self,
        endpoint: str,
        identity: str,
        hello: Hello,
        on_text: Callable[[TextChunks], None],
        on_answer: Callable[[], None],
    ) -> None:
        self.answered = False
        self.since = 0.0  # when it was found
        self._hello = hello
        self._on_text = on_text
        self._on_answer = on_answer
        self._client: Client[DetokenizerToTokenizer] = Client(
            endpoint, identity, DetokenizerToTokenizer, self._on_message, server="detokenizer"
        )
        self._client.on_writable = self.introduce
        self._client.watch(self._on_disconnect)
        self.introduce()

    def introduce(self) -> None:
        if not self.answered:
            self._client.try_send(self._hello)

    def close(self) -> None:
        self._client.close()

    def _on_disconnect(self) -> None:
        self.answered = False

    def _on_message(self, message: DetokenizerToTokenizer, frames: list[bytes]) -> None:
        if not self.answered:
            self.answered = True
            self._on_answer()
        if isinstance(message, TextChunks):
            self._on_text(message)
        else:
            assert isinstance(message, Pong)


class DetokenizerLinks:
    """Follows the list in SystemStatus: connects to newcomers, closes what has vanished."""

    def __init__(
        self,
        identity: str,
        hello: Hello,
        on_text: Callable[[TextChunks], None],
        on_answer: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._clock = clock
        self._identity = identity
        self._hello = hello
        self._on_text = on_text
        self._on_answer = on_answer
        self._links: dict[tuple[str, str], _Link] = {}

    @property
    def connected(self) -> bool:
        """Whether any detokenizer reaches us."""
        return any(link.answered for link in self._links.values())

    @property
    def ready(self) -> bool:
        """Whether text can come from every detokenizer the scheduler may choose; newcomers get a moment."""
        newest = self._clock.now() - INTRODUCTION_S
        return self.connected and all(link.answered or link.since > newest for link in self._links.values())

    def follow(self, wanted: Iterable[tuple[str, str]]) -> None:
        wanted = set(wanted)
        for key in self._links.keys() - wanted:
            self._links.pop(key).close()
        for key in wanted - self._links.keys():
            log.debug("detokenizer found", detokenizer=key[0], endpoint=key[1])
            link = _Link(key[1], self._identity, self._hello, self._on_text, self._on_answer)
            link.since = self._clock.now()
            self._links[key] = link

    def heartbeat(self) -> None:
        """Introduce ourselves again to who has not answered."""
        for link in self._links.values():
            link.introduce()

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._links.clear()
