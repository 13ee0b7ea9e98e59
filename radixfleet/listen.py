"""The listening sockets of `serve`, taken before anything heavy starts and kept while their servers are replaced."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from radixfleet.errors import CommandError

BACKLOG = 2048


@contextmanager
def listen(host: str, port: int, count: int = 1) -> Iterator[list[socket.socket]]:
    """`count` sockets on one address; the kernel spreads connections over them evenly.

    Each waits with its own connections while its server is replaced. Raises CommandError where the address cannot
    be had.
    """
    with ExitStack() as stack:
        if count == 1:
            yield [stack.enter_context(_bind(host, port, shared=False))]
            return
        with _bind(host, port, shared=False) as first:  # alone: fails where any other program has the port
            port = first.getsockname()[1]
        yield [stack.enter_context(_bind(host, port, shared=True)) for _ in range(count)]


def _bind(host: str, port: int, *, shared: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG, reuse_port=shared)
    except OverflowError:
        raise CommandError(f"{port} is no port") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise CommandError(f"port {port} on {host} is taken by another program; choose another --port") from None
        raise CommandError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from None


def url_of(listeners: Sequence[socket.socket], *, secure: bool = False) -> str:
    """How a client on this machine reaches them."""
    host, port = listeners[0].getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
