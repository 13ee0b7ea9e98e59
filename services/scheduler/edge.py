"""What the scheduler needs of a socket, so that tests can be one; leaves everything else to shared.transport."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Edge(Protocol):
    def send(self, identity: bytes, message: msgspec.Struct, *frames: bytes) -> None:
        """Queue for one peer. Raises PeerGone or PeerBusy."""
        ...
