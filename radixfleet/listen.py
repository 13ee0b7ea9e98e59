"""The listening socket of `serve`, taken before anything heavy starts and kept while its server is replaced."""

from __future__ import annotations

import errno
import socket

from radixfleet.errors import CommandError

BACKLOG = 2048


def listen(host: str, port: int) -> socket.socket:
    """Raises CommandError where the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OverflowError:
        raise CommandError(f"{port} is no port") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CommandError(f"port {port} on {host} is taken by another program; choose another --port") from None
        raise CommandError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from None


def url_of(listener: socket.socket) -> str:
    """How a client on this machine reaches it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
