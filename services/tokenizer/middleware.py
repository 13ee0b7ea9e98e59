"""What wraps every request: its id and trace, who calls, the count of requests in work and its limits.

Pure ASGI: anything that buffers would break streams. Leaves errors to app, bodies to body and keys to access.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import MutableMapping
from typing import Any

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.tokenizer import calls
from services.tokenizer.access import Access
from services.tokenizer.body import MAX_TIMEOUT_S
from services.tokenizer.calls import Call
from services.tokenizer.errors import ApiError, invalid, unavailable
from services.tokenizer.limits import Limits
from services.tokenizer.metrics import Measurements
from shared.config import TokenizerConfig

log = structlog.get_logger(__name__)

REQUEST_ID = b"x-request-id"
TIMEOUT_HEADER = "x-request-timeout"
MAX_ID_CHARS = 128


class Door:
    """Stamps, admits, counts and bounds requests."""

    def __init__(
        self, app: ASGIApp, access: Access, limits: Limits, measurements: Measurements, config: TokenizerConfig
    ) -> None:
        self._app = app
        self._access = access
        self._limits = limits
        self._measurements = measurements
        self._max_concurrent = config.max_concurrent_requests
        self._request_timeout = config.request_timeout
        self._root_path = config.fastapi_root_path
        measurements.log_requests = config.log_requests  # may be changed while running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if self._root_path:
            scope["root_path"] = self._root_path
        headers = _headers(scope)
        request_id = _request_id(headers)
        measured = self._measurements

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                measured.responses[message["status"]] += 1
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id.encode())]
            await send(message)

        measured.counters["http_requests"] += 1
        try:
            call = self._enter(scope, headers, request_id)
        except ApiError as refusal:
            await refusal.response()(scope, receive, stamped)
            return
        if self._access.is_work(scope):
            await self._work(scope, receive, stamped, call)
        else:
            await self._app(scope, receive, stamped)

    def _enter(self, scope: Scope, headers: dict[bytes, bytes], request_id: str) -> Call:
        """Find out who calls, for the routes and for every line of the log. Raises ApiError."""
        call = self._access.admit(scope)
        traceparent = headers.get(b"traceparent", b"").decode("latin-1").strip()
        trace = calls.trace_id(traceparent)
        call.traceparent = traceparent if trace else ""
        call.limit_time(self._request_timeout)
        call.limit_time(_seconds(headers.get(TIMEOUT_HEADER.encode())))
        calls.begin(call)
        told = {"request_id": request_id, "trace_id": trace, "tenant": call.tenant}
        structlog.contextvars.unbind_contextvars(*told)  # of the request before on the same connection
        structlog.contextvars.bind_contextvars(**{name: value for name, value in told.items() if value})
        return call

    async def _work(self, scope: Scope, receive: Receive, send: Send, call: Call) -> None:
        measured = self._measurements
        if measured.active >= self._max_concurrent:
            await unavailable("Too many requests are in work.").response()(scope, receive, send)
            return
        try:
            if self._access.costs(scope):
                self._limits.check(call.tenant)
        except ApiError as refusal:
            await refusal.response()(scope, receive, send)
            return
        measured.active += 1
        self._say("request received", scope)
        try:
            await self._app(scope, receive, send)
        finally:
            measured.active -= 1
            self._say("request finished", scope)

    def _say(self, event: str, scope: MutableMapping[str, Any]) -> None:
        if self._measurements.log_requests:
            log.info(event, path=scope["path"])


def _headers(scope: Scope) -> dict[bytes, bytes]:
    """The first of each name."""
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        found.setdefault(name, value)
    return found


def _request_id(headers: dict[bytes, bytes]) -> str:
    """The client's own id if it is one, else a new one."""
    value = headers.get(REQUEST_ID, b"")
    if 0 < len(value) <= MAX_ID_CHARS and value.isascii() and value.decode().isprintable():
        return value.decode()
    return uuid.uuid4().hex


def _seconds(value: bytes | None) -> float | None:
    """A time-out in a header. Raises ApiError."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise invalid(f"The header {TIMEOUT_HEADER} is a number of seconds up to {MAX_TIMEOUT_S:g}.", TIMEOUT_HEADER)
    return seconds
