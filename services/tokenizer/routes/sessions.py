"""POST /open_session and /close_session; leaves what sessions hold to sessions."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from services.tokenizer import body, calls, sse, validation
from services.tokenizer.context import Context
from services.tokenizer.openapi import takes
from services.tokenizer.sessions import DEFAULT_TTL_S, MAX_TTL_S


class OpenSessionBody(msgspec.Struct, kw_only=True):
    """POST /open_session. `timeout` are seconds without a request after which the session is closed."""

    capacity_of_str_len: int
    session_id: str | None = None
    timeout: float | None = None


class CloseSessionBody(msgspec.Struct, kw_only=True):
    """POST /close_session."""

    session_id: str


REFUSED = {"streaming": "every request says itself whether it streams"}


def router(context: Context) -> APIRouter:
    routes = APIRouter(tags=["native"])

    @routes.post("/open_session", openapi_extra=takes(OpenSessionBody))
    async def open_session(request: Request) -> Response:
        """Open a session; the answer is its id."""
        wishes, unknown = await body.read(request, context, OpenSessionBody, REFUSED)
        capacity = validation.in_range("capacity_of_str_len", wishes.capacity_of_str_len, 1, float("inf"))
        ttl = validation.in_range("timeout", wishes.timeout, 0, MAX_TTL_S, above=True)
        name = None if wishes.session_id is None else validation.request_id(wishes.session_id, "session_id")
        opened = context.sessions.open(calls.current().tenant, capacity or 1, name, ttl or DEFAULT_TTL_S)
        return Response(sse.json_bytes(opened), headers=context.ignored(unknown), media_type="application/json")

    @routes.post("/close_session", openapi_extra=takes(CloseSessionBody))
    async def close_session(request: Request) -> Response:
        """Close a session; requests under way end as they would."""
        wishes, unknown = await body.read(request, context, CloseSessionBody, {})
        context.sessions.close(calls.current().tenant, wishes.session_id)
        return Response(status_code=200, headers=context.ignored(unknown))

    return routes
