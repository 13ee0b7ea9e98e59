"""What wraps every request: its id, the count of requests in work, the answer when there are too many.

Pure ASGI: anything that buffers would break streams. Leaves errors to app and bodies to body.
"""

from __future__ import annotations

import uuid
from collections.abc import MutableMapping
from typing import Any

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.tokenizer.errors import unavailable
from services.tokenizer.metrics import Measurements

REQUEST_ID = b"x-request-id"
MAX_ID_CHARS = 128
WORK_PATHS = frozenset(
    (
        *("/generate", "/v1/completions", "/v1/chat/completions", "/v1/score"),
        *("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"),
    )
)


class Door:
    """Stamps, counts and bounds requests."""

    def __init__(self, app: ASGIApp, measurements: Measurements, max_concurrent: int, log_requests: bool) -> None:
        self._app = app
        self._measurements = measurements
        self._max_concurrent = max_concurrent
        self._log = structlog.get_logger(__name__)
        measurements.log_requests = log_requests  # may be changed while running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        measured = self._measurements

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                measured.responses[message["status"]] += 1
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id)]
            await send(message)

        measured.counters["http_requests"] += 1
        if scope["path"] not in WORK_PATHS:
            await self._app(scope, receive, stamped)
        elif measured.active >= self._max_concurrent:
            await unavailable("Too many requests are in work.").response()(scope, receive, stamped)
        else:
            await self._work(scope, receive, stamped, request_id.decode("latin-1"))

    async def _work(self, scope: Scope, receive: Receive, send: Send, request_id: str) -> None:
        self._measurements.active += 1
        self._say("request received", scope, request_id)
        try:
            await self._app(scope, receive, send)
        finally:
            self._measurements.active -= 1
            self._say("request finished", scope, request_id)

    def _say(self, event: str, scope: MutableMapping[str, Any], request_id: str) -> None:
        if self._measurements.log_requests:
            self._log.info(event, path=scope["path"], request_id=request_id)


def _request_id(scope: Scope) -> bytes:
    """The client's own id if it is one, else a new one."""
    for name, value in scope["headers"]:
        if name == REQUEST_ID and 0 < len(value) <= MAX_ID_CHARS and value.isascii() and value.decode().isprintable():
            return bytes(value)
    return uuid.uuid4().hex.encode()
