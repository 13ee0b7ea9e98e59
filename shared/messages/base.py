"""The base of all wire messages and how int32 columns ride in them; leaves meaning to the other modules."""

from __future__ import annotations

import msgspec

PROTOCOL_VERSION = 2
"""Grows when a change cannot be read by an older peer; exchanged in every hello."""


class Message(msgspec.Struct, frozen=True, gc=False, array_like=True, omit_defaults=True):
    """Immutable and positional: new fields go last and have a default; tags are never used again."""
