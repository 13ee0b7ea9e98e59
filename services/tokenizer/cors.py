"""Lets pages of other origins call the API from a browser, where the operator names them. Leaves keys to access."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

EXPOSED = ("x-request-id", "x-radixfleet-ignored", "retry-after")
METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE")
MAX_AGE_S = 600


def wrap(app: ASGIApp, origins: str) -> ASGIApp:
    """`app`, or `app` behind a middleware that answers preflights; `origins` separated by commas.

    No credentials: keys travel in a header that pages set themselves, never in cookies.
    """
    allowed = [origin.strip().rstrip("/") for origin in origins.split(",") if origin.strip()]
    if not allowed:
        return app
    return CORSMiddleware(
        app,
        allow_origins=allowed,
        allow_methods=METHODS,
        allow_headers=["*"],
        expose_headers=EXPOSED,
        max_age=MAX_AGE_S,
    )
