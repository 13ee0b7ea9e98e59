"""What the scheduler needs of a socket, so that tests can be one; leaves everything else to shared.transport."""

from __future__ import annotations

from typing import Protocol

import msgspec


def split_identity(identity: bytes) -> tuple[str, int]:
    """`id/incarnation` of a peer; incarnation -1 where there is none."""
    name, _, incarnation = identity.decode(errors="replace").rpartition("/")
    if not name or not incarnation.isdecimal():
        return identity.decode(errors="replace"), -1
    return name, int(incarnation)


class Edge(Protocol):
    def send(self, identity: bytes, message: msgspec.Struct, *frames: bytes | memoryview) -> None:
        """Queue for one peer. Raises PeerGone or PeerBusy."""
        ...
