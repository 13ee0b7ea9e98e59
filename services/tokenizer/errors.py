"""The one error and the one envelope every failure leaves in; leaves finding failures to everyone else.

{"error": {"message": ..., "type": ..., "param": ..., "code": ...}}
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from shared.messages.request import RejectCode, RequestRejected
from shared.messages.stream import Finish, FinishReason

CODES = {
    400: "invalid_value",
    401: "invalid_api_key",
    403: "permission_denied",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_content_encoding",
    429: "queue_full",
    431: "request_head_too_large",
    499: "client_closed_request",
    500: "internal_error",
    503: "service_unavailable",
    504: "timeout",
}
REJECT_STATUS: dict[RejectCode, int] = {
    "queue_full": 429,
    "too_long": 400,
    "bad_constraint": 400,
    "no_worker": 503,
    "draining": 503,
    "duplicate_id": 400,
    "internal": 500,
    "rate_limited": 429,
}
REJECT_CODE: dict[RejectCode, str] = {
    "too_long": "context_length_exceeded",
    "internal": "internal_error",
    "rate_limited": "rate_limit_exceeded",
}


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct):
    """What every failing answer holds."""

    error: ErrorDetail


class ApiError(Exception):
    """A failure with its HTTP status. `retry_after` is in seconds; `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code or CODES.get(status)
        self.retry_after = retry_after
        self.headers = headers or {}

    @property
    def type(self) -> str:
        if self.status == 401:
            return "authentication_error"
        if self.status == 403:
            return "permission_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    def body(self) -> bytes:
        """The envelope as JSON."""
        return msgspec.json.encode(ErrorBody(ErrorDetail(self.message, self.type, self.param, self.code)))

    def response(self, headers: dict[str, str] | None = None) -> Response:
        headers = {**self.headers, **(headers or {})}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        return Response(self.body(), self.status, headers, "application/json")


class ClientGone(Exception):
    """The client closed its connection; nobody is left to answer."""


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def too_long(num_tokens: int, limit: int, param: str | None, *, at_least: bool = False) -> ApiError:
    """The prompt does not fit; both numbers are in the text."""
    count = f"at least {num_tokens}" if at_least else str(num_tokens)
    return invalid(
        f"The input ({count} tokens) is longer than the maximum context length of this model "
        f"({limit} tokens, of which at least one is needed for the answer).",
        param,
        "context_length_exceeded",
    )


def unavailable(message: str, retry_after: float = 1.0) -> ApiError:
    return ApiError(503, message, retry_after=retry_after)


def from_rejection(message: RequestRejected) -> ApiError:
    """What the scheduler refused, in HTTP terms."""
    status = REJECT_STATUS[message.code]
    retry_after = message.retry_after_s or 1.0
    field, separator, _ = message.detail.partition(": ")  # how the compiler begins what it says of a source
    return ApiError(
        status,
        message.detail or f"The request was refused: {message.code}.",
        param=field if separator and message.code == "bad_constraint" else None,
        code=REJECT_CODE.get(message.code, message.code),
        retry_after=retry_after if status in (429, 503) else None,
    )


def from_finish(finish: Finish) -> ApiError | None:
    """The failure behind the end of a request; None where the client gets an ordinary answer."""
    if finish.reason is FinishReason.ERROR:
        return ApiError(finish.status or 500, finish.message or "The request failed.")
    if finish.reason is FinishReason.ABORT and finish.status >= 400:
        return ApiError(finish.status, finish.message or "The request was aborted.")
    return None
