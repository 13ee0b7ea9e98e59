"""Reads a request's body within its limits and turns it into a struct; leaves the shapes to schema."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

from services.tokenizer import calls, labels, validation
from services.tokenizer.context import BodyBudget, Context
from services.tokenizer.errors import ApiError, ClientGone, invalid, unavailable

T = TypeVar("T")

MAX_TIMEOUT_S = 86_400.0
INLINE_BYTES = 64 << 10  # larger bodies are decoded in the thread pool


async def read(
    request: Request, context: Context, kind: type[T], refused: Mapping[str, str], *, empty: bool = False
) -> tuple[T, list[str]]:
    """The body and the names of fields nobody knows. Raises ApiError. With `empty`, no body stands for `{}`."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise invalid("Unsupported Media Type: Only 'application/json' is allowed.", code="unsupported_media_type")
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise ApiError(415, "The body must not be compressed.", param="content-encoding")
    with Share(context.bodies) as share:
        body = await read_bytes(request, context.config.max_body_bytes, context.config.client_stall_timeout, share)
        if empty and not body:
            body = b"{}"
        if len(body) <= INLINE_BYTES:
            found = validation.decode(body, kind, refused)
        else:
            found = await context.text.run(validation.decode, body, kind, refused)
    wishes, unknown = found
    calls.current().limit_time(
        validation.in_range("timeout", getattr(wishes, "timeout", None), 0, MAX_TIMEOUT_S, above=True)
    )
    given = getattr(wishes, labels.FIELD, None)
    calls.current().labels = context.labels.read(request.headers.get(labels.HEADER), given)
    context.refuse_unknown(unknown)
    return wishes, unknown


class Share:
    """What one request holds of the memory for bodies; given back at the end of the `with`."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held = 0

    def __enter__(self) -> Share:
        return self

    def __exit__(self, *error: object) -> None:
        self._budget.held -= self._held

    def take(self, size: int) -> None:
        """Raises ApiError where all requests together would hold too much."""
        if self._budget.held + size > self._budget.limit:
            raise unavailable("Too many large requests are being read.")
        self._budget.held += size
        self._held += size


async def read_bytes(request: Request, max_bytes: int, patience_s: float, share: Share) -> bytes:
    """The whole body. 413 beyond the limit (before reading where the length is told), 408 if the client stops."""
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told) > max_bytes:
        raise _too_large(max_bytes)
    pieces: list[bytes] = []
    size = 0
    chunks = request.stream()
    while True:
        try:
            async with asyncio.timeout(patience_s):
                piece = await anext(chunks, None)
        except TimeoutError:
            raise ApiError(408, "The request body did not arrive in time.") from None
        except ClientDisconnect:
            raise ClientGone from None
        if piece is None:
            return b"".join(pieces)
        size += len(piece)
        if size > max_bytes:
            raise _too_large(max_bytes)
        share.take(len(piece))
        pieces.append(piece)


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The request body is larger than {max_bytes} bytes.")
