"""The connection to the scheduler: introduced until answered, and a new life whenever it may have lost something.

ZeroMQ connects again by itself, but what was under way in a broken connection is lost in silence. A new name
makes the scheduler open every stream again with all its tokens. Leaves the messages' meaning to `detokenizer`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

import structlog

from shared.messages.control import Heartbeat, Hello, Ping, Pong
from shared.messages.edges import ToDetokenizer
from shared.messages.stream import StopMatched, StreamOpen, TokenChunks
from shared.service import new_incarnation
from shared.transport import Client, Frames, PeerBusy

log = structlog.get_logger(__name__)

QUICK_HELLOS = 20  # while a connection comes up; then one with every heartbeat


class SchedulerLink:
    """`on_message` gets stream messages; `on_new_life` is called when all streams are void and will be opened again."""

    def __init__(
        self,
        endpoint: str,
        service_id: str,
        own_endpoint: str,
        on_message: Callable[[StreamOpen | TokenChunks], None],
        on_new_life: Callable[[], None],
    ) -> None:
        self.incarnation = 0
        self._endpoint = endpoint
        self._service_id = service_id
        self._own_endpoint = own_endpoint
        self._on_message = on_message
        self._on_new_life = on_new_life
        self._welcome = False
        self._renewing = False
        self._closed = False
        self._quick_hellos = 0
        self._stops: deque[StopMatched] = deque()
        self._client = self._connect()

    @property
    def malformed(self) -> int:
        return self._client.malformed

    def heartbeat(self, gauges: dict[str, float]) -> None:
        """Once a second: who we are, until that is answered, and what we measure."""
        if not self._welcome:
            self._say_hello()
        self._client.try_send(Heartbeat(self._service_id, self.incarnation, gauges=gauges))

    def stop_matched(self, message: StopMatched) -> None:
        """Send it now, or as soon as there is room."""
        self._stops.append(message)
        self._send_stops()

    def forget_stops(self) -> None:
        self._stops.clear()

    def renew(self) -> None:
        """Begin a new life, once the present event is handled."""
        if not self._renewing and not self._closed:
            self._renewing = True
            asyncio.get_running_loop().call_soon(self._renew)

    def close(self) -> None:
        self._closed = True
        self._client.close()

    def _connect(self) -> Client[ToDetokenizer]:
        self.incarnation = new_incarnation()
        identity = f"{self._service_id}/{self.incarnation}"
        client: Client[ToDetokenizer] = Client(self._endpoint, identity, ToDetokenizer, self._deliver)
        client.on_writable = self._on_writable
        client.watch(self.renew)
        self._client = client
        self._welcome = False
        self._quick_hellos = QUICK_HELLOS
        self._say_hello()
        return client

    def _renew(self) -> None:
        self._renewing = False
        if self._closed:
            return
        log.info("connecting to the scheduler again", endpoint=self._endpoint)
        self._client.close()
        self._stops.clear()
        self._on_new_life()
        self._connect()

    def _say_hello(self) -> None:
        self._client.try_send(Hello("detokenizer", self._service_id, self.incarnation, self._own_endpoint))

    def _on_writable(self) -> None:
        """A send met no connection or a full queue a moment ago."""
        self._send_stops()
        if not self._welcome and self._quick_hellos > 0:
            self._quick_hellos -= 1
            self._say_hello()

    def _send_stops(self) -> None:
        with contextlib.suppress(PeerBusy):  # _on_writable comes back here
            while self._stops:
                self._client.send(self._stops[0])
                self._stops.popleft()

    def _deliver(self, message: ToDetokenizer, frames: Frames) -> None:
        match message:
            case Ping():
                self._client.try_send(Pong(message.nonce))
            case Pong():
                self._welcome = message.healthy
                if not message.healthy:  # a scheduler that does not know us any more
                    self._say_hello()
            case _:
                self._on_message(message)
