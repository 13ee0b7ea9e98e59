"""Bytes of server-sent events; leaves what they say to render/ and when they go to the exchange."""

from __future__ import annotations

from typing import Any

import msgspec

from services.tokenizer.errors import ApiError

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
MEDIA_TYPE = "text/event-stream"

_encoder = msgspec.json.Encoder()
# Line separators of Unicode: legal inside JSON strings, but some readers split events at them.
_SEPARATORS = ((b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"), (b"\xc2\x85", b"\\u0085"))


def json_bytes(value: Any) -> bytes:
    """JSON in which no reader of lines finds a line end."""
    return _one_line(_encoder.encode(value))


def _one_line(data: bytes) -> bytes:
    if not data.isascii():
        for raw, escaped in _SEPARATORS:
            data = data.replace(raw, escaped)
    return data


def event(value: Any) -> bytes:
    return b"data: " + json_bytes(value) + b"\n\n"


def named(name: str, value: Any) -> bytes:
    """An event with a name of its own."""
    return b"event: " + name.encode() + b"\n" + event(value)


def error(failure: ApiError) -> bytes:
    """A failure in mid-stream, in the same envelope as everywhere."""
    return b"data: " + _one_line(failure.body()) + b"\n\n"
