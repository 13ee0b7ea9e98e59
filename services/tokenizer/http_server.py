"""uvicorn inside a running event loop: its own socket, its start-up lines, no signal handlers of its own.

Leaves signals and the order of ending to service.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from services.tokenizer.http_protocol import BoundedHttpProtocol

BACKLOG = 2048
_TCP = (socket.AF_INET, socket.AF_INET6)
KEEP_ALIVE_S = 75  # longer than the pools of usual clients keep idle connections
GRACEFUL_SHUTDOWN_S = 3  # for answers that were already ended, to reach their clients


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process, which drains first."""
        yield


class HttpServer:
    """Serves one app from `start()` to `stop()`."""

    def __init__(
        self, app: ASGIApp, listener: socket.socket, log_level: str, tls: Mapping[str, Any] | None = None
    ) -> None:
        self._listener = listener
        self._scheme = "https" if tls else "http"
        config = uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            log_config=_log_config(log_level),
            access_log=log_level in ("debug", "info"),
            timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
            timeout_keep_alive=KEEP_ALIVE_S,
            lifespan="on",
            ws="none",
            server_header=False,
            **(tls or {}),
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        if self._listener.family not in _TCP:
            return f"unix:{self._listener.getsockname()}"
        host, port = self._listener.getsockname()[:2]
        return f"{self._scheme}://[{host}]:{port}" if ":" in host else f"{self._scheme}://{host}:{port}"

    async def start(self) -> None:
        """Listen; returns when requests are taken. Raises what kept uvicorn from starting."""
        url = self.url
        self._serving = asyncio.create_task(self._server.serve([self._listener]))
        startup = self._server.startup
        started = asyncio.Event()

        async def announced(sockets: list[socket.socket] | None = None) -> None:
            await startup(sockets)
            logging.getLogger("uvicorn.error").info("Uvicorn running on %s (Press CTRL+C to quit)", url)
            started.set()

        self._server.startup = announced  # type: ignore[method-assign]
        waiting = asyncio.ensure_future(started.wait())
        await asyncio.wait({self._serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            waiting.cancel()
            await self._serving

    async def stop(self) -> None:
        """Close the listener, let answers reach their clients, end."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving


def listen(host: str, port: int, inherited_fd: int, stall_timeout: float, *, reuse_port: bool = False) -> socket.socket:
    """The listening socket. Raises OSError where the address is taken.

    The kernel drops connections whose client takes nothing for `stall_timeout` seconds, answered or not.
    """
    if inherited_fd >= 0:
        listener = socket.socket(fileno=inherited_fd)
    else:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=reuse_port)
    listener.setblocking(False)
    if sys.platform == "linux" and listener.family in _TCP:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_timeout * 1000))
    return listener


def _log_config(log_level: str) -> dict[str, Any]:
    """uvicorn's usual lines on stderr."""
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"()": "uvicorn.logging.DefaultFormatter", "fmt": "%(levelprefix)s %(message)s"}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "stream": "ext://sys.stderr"}},
        "loggers": {
            "uvicorn": {"handlers": ["stderr"], "level": "INFO", "propagate": False},
            "uvicorn.access": {"handlers": ["stderr"], "level": log_level.upper(), "propagate": False},
        },
    }
