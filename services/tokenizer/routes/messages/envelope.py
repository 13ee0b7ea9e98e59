"""Errors of the messages routes in the envelope of their API, whoever made them: routes, keys, limits, the router.

{"type": "error", "error": {"type": ..., "message": ...}, "request_id": ...}
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.tokenizer.errors import ApiError, ErrorBody

PATH = "/v1/messages"
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def of(error: ApiError, request_id: str | None = None) -> dict[str, Any]:
    """The envelope of a failure."""
    return _envelope(error.status, error.message, request_id)


def _envelope(status: int, message: str, request_id: str | None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    told = {"request_id": request_id} if request_id else {}
    return {"type": "error", "error": {"type": kind, "message": message}, **told}


class MessagesErrors:
    """Around the whole app; everything but failures on these paths passes through."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and PATH in scope["path"]:
            send = _Rewriter(send)
        await self._app(scope, receive, send)


class _Rewriter:
    """Holds the start of a failure until its body is there."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            request_id = next((value for name, value in headers if name == b"x-request-id"), None)
            message["headers"] = [*headers, (b"request-id", request_id)] if request_id else headers
            if message["status"] >= 400:
                self._start = message
                return
        elif self._start is not None and message["type"] == "http.response.body":
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._finish(self._start)
            return
        await self._send(message)

    async def _finish(self, start: Message) -> None:
        request_id = next((value.decode() for name, value in start["headers"] if name == b"request-id"), None)
        try:
            text = msgspec.json.decode(self._body, type=ErrorBody).error.message
            body = msgspec.json.encode(_envelope(start["status"], text, request_id))
        except msgspec.MsgspecError:
            body = self._body
        kept = [(name, value) for name, value in start["headers"] if name != b"content-length"]
        start["headers"] = [*kept, (b"content-length", str(len(body)).encode())]
        self._start = None
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})
