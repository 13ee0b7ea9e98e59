"""Where a worker's socket for pages is bound: on the way to the scheduler. Leaves the socket to the mover."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

MAX_IPC_PATH = 100  # of 107 bytes of a Unix socket's address


def bind_address(wish: str, scheduler: str, worker_id: str) -> str:
    """An endpoint to bind, `wish` where there is one; empty where other workers could not reach any.

    Beside an ipc scheduler it is a socket in the same private folder. Towards a tcp scheduler it is a free port of
    the one address that packets to the scheduler leave from, never of all addresses.
    """
    if wish:
        return wish
    parts = urlsplit(scheduler)
    if parts.scheme == "ipc":
        # The next life binds the same path, so that none is left behind by those that were killed.
        path = f"{os.path.dirname(scheduler.removeprefix('ipc://'))}/kv-{worker_id}.sock"
        return f"ipc://{path}" if len(os.fsencode(path)) <= MAX_IPC_PATH else ""
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        return ""
    host = _own_address(parts.hostname, parts.port)
    return f"tcp://{host}:*" if host else ""


def _own_address(host: str, port: int) -> str:
    """The address this machine speaks to `host` from; no packet is sent to find it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            own = str(probe.getsockname()[0])
    except OSError:
        return ""
    return f"[{own}]" if family == socket.AF_INET6 else own
