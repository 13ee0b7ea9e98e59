"""The FastAPI application: routes, the one error envelope, the OpenAPI document; leaves its life to service."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp

from services.tokenizer import cors, openapi
from services.tokenizer.context import Context
from services.tokenizer.cors import METHODS
from services.tokenizer.errors import ApiError, ClientGone, invalid
from services.tokenizer.middleware import Door
from services.tokenizer.routes import (
    chat,
    completions,
    control,
    fleet,
    messages,
    models,
    native,
    ops,
    parsing,
    responses,
    score,
    script,
    sessions,
)
from services.tokenizer.routes.messages.envelope import MessagesErrors

_FAMILIES = (
    chat,
    completions,
    responses,
    messages,
    models,
    native,
    parsing,
    ops,
    control,
    fleet,
    score,
    script,
    sessions,
)
log = structlog.get_logger(__name__)


def create(context: Context) -> ASGIApp:
    """The whole HTTP side over one context."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield

    app = FastAPI(
        title="RadixFleet",
        version=context.version,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect goes to whatever host, and by whatever scheme, the request named
    )
    for family in _FAMILIES:
        app.include_router(family.router(context))
    for kind, handler in _HANDLERS.items():
        app.add_exception_handler(kind, handler)
    openapi.install(app, context.access)
    door = Door(app, context.access, context.frontend.limits, context.measurements, context.config)
    return cors.wrap(MessagesErrors(door), context.config.cors_origins)


async def _api_error(request: Request, error: ApiError) -> Response:
    return error.response()


async def _http_error(request: Request, error: Any) -> Response:
    """Unknown routes and wrong methods."""
    messages = {
        404: f"There is no {request.url.path!r} here.",
        405: f"{request.method} is not allowed for {request.url.path!r}.",
    }
    message = messages.get(error.status_code, str(error.detail))
    headers = dict(error.headers or {})
    if error.status_code == 405:
        # The framework names only the methods of the first route with this path.
        headers["Allow"] = ", ".join(_methods_of(request))
    return ApiError(error.status_code, message).response(headers)


def _methods_of(request: Request) -> list[str]:
    def fits(method: str) -> bool:
        scope = {**request.scope, "method": method}
        return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)

    return [method for method in METHODS if fits(method)]


async def _invalid(request: Request, error: Any) -> Response:
    return invalid("The request is not valid.").response()


async def _client_gone(request: Request, error: Any) -> Response:
    return Response(status_code=499)


async def _internal(request: Request, error: Any) -> Response:
    log.error("request failed", path=request.url.path, error=repr(error))
    return ApiError(500, "Internal error; the server's log knows more.").response()


_HANDLERS: dict[type[Exception], Callable[[Request, Any], Any]] = {
    ApiError: _api_error,
    HTTPException: _http_error,
    RequestValidationError: _invalid,
    ClientGone: _client_gone,
    Exception: _internal,
}
