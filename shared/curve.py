"""CURVE keys of a fleet: who may speak on which socket. Leaves encryption to ZeroMQ, making keys to `keygen`.

A folder holds `NAME.key` (public, of everybody) and `NAME.key_secret` (one's own). The part of a name before the first
`-` is its kind: `worker`, or `worker-rack7` for a key that can be withdrawn alone. A server admits the kinds its edge
is for and nobody else; a key whose file is not there when the server starts is refused.

CURVE is CurveZMQ (ZeroMQ RFC 26), the allow-list a ZAP handler (RFC 27).
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import zmq
import zmq.auth
from zmq.auth.thread import ThreadAuthenticator

log = structlog.get_logger(__name__)

KINDS = ("tokenizer", "scheduler", "worker", "detokenizer")
SECRET = ".key_secret"  # noqa: S105 - the ending of a file name
PUBLIC = ".key"


class KeysUnusable(Exception):
    """The folder lacks a key or shows it to others; the text says which."""


@dataclass(frozen=True)
class Keyring:
    """`public` and `secret` are one's own key (z85), `others` the public keys of the fleet by name."""

    public: bytes
    secret: bytes
    others: dict[str, bytes]

    def of(self, kind: str) -> bytes:
        """The public key servers of that kind share. Raises KeysUnusable."""
        if kind not in self.others:
            raise KeysUnusable(f"no {kind}{PUBLIC} among the keys: it is needed to know a {kind}")
        return self.others[kind]

    def of_kinds(self, kinds: Iterable[str]) -> frozenset[bytes]:
        wanted = set(kinds)
        return frozenset(key for name, key in self.others.items() if name.partition("-")[0] in wanted)


@dataclass
class _Guard:
    """What ZAP asks for one kind of server: the credentials provider of a domain."""

    allowed: frozenset[bytes]
    refused: int = 0

    def callback(self, domain: str, key: bytes) -> bool:
        if key in self.allowed:
            return True
        self.refused += 1
        if self.refused in (1, 10, 100) or self.refused % 1000 == 0:
            log.warning("key refused", edge=domain, key=key.decode(errors="replace"), count=self.refused)
        return False


@dataclass
class _State:
    """One per process: ZeroMQ has one ZAP handler for each context."""

    keyring: Keyring | None = None
    authenticators: dict[int, ThreadAuthenticator] = field(default_factory=dict)
    guards: dict[str, _Guard] = field(default_factory=dict)


_state = _State()


def load(folder: str | Path, name: str) -> Keyring:
    """The keys that the service `name` needs: its own pair and everybody's public keys. Raises KeysUnusable."""
    folder = Path(folder)
    own = folder / (name + SECRET)
    if not own.is_file():
        candidates = sorted(folder.glob(f"{name}-*{SECRET}"))
        if not candidates:
            raise KeysUnusable(f"{folder} has no {name}{SECRET}; `radixfleet keygen --dir {folder}` makes keys")
        own = candidates[0]
    if own.stat().st_mode & (stat.S_IWGRP | stat.S_IRWXO):  # a group may read: so do secrets of Kubernetes come
        raise KeysUnusable(f"{own} can be read by others: chmod 600")
    public, secret = _read(own)
    if secret is None:
        raise KeysUnusable(f"{own} holds no secret key")
    others = {path.name.removesuffix(PUBLIC): _read(path)[0] for path in sorted(folder.glob(f"*{PUBLIC}"))}
    return Keyring(public, secret, others)


def use(keyring: Keyring | None) -> None:
    """Every tcp socket this process opens from now on is under CURVE with these keys (None: none is).

    Servers that are open admit nobody any more. What answers ZeroMQ goes on: its address is free again only some time
    after it has ended.
    """
    for guard in _state.guards.values():
        guard.allowed = frozenset()
    _state.guards.clear()
    _state.keyring = keyring


def hold(keyring: Keyring) -> None:
    """As `use`, but servers that are open keep admitting whom they admit: for several services in one process."""
    _state.keyring = keyring


def close() -> None:
    """End what answers for the keys: nobody is admitted any more."""
    while _state.authenticators:
        _state.authenticators.popitem()[1].stop()
    _state.guards.clear()
    _state.keyring = None


def in_use() -> bool:
    """Whether tcp sockets are under CURVE."""
    return _state.keyring is not None


def secure_server(
    socket: zmq.Socket[bytes], endpoint: str, context: zmq.Context[zmq.Socket[bytes]], edge: str, peers: Iterable[str]
) -> None:
    """Before the bind: only `peers` (kinds of keys) may connect. Warns where a tcp endpoint is open to all."""
    if not endpoint.startswith("tcp://"):
        return
    keyring = _state.keyring
    if keyring is None:
        log.warning(
            "NO ENCRYPTION AND NO KEYS: whoever reaches this port may command the fleet and read every prompt; "
            "see `radixfleet keygen` and --curve-dir",
            endpoint=endpoint,
        )
        return
    guard = _state.guards.setdefault(edge, _Guard(frozenset()))
    guard.allowed |= keyring.of_kinds(peers) | {keyring.public}  # its own key: health checks from the same host
    _authenticator(context).configure_curve_callback(edge, credentials_provider=guard)
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keyring.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, edge.encode())
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def secure_client(socket: zmq.Socket[bytes], endpoint: str, server: str) -> None:
    """Before the connect: speak only to a server with the key of that kind. Raises KeysUnusable."""
    keyring = _state.keyring
    if keyring is None or not endpoint.startswith("tcp://"):
        return
    socket.setsockopt(zmq.CURVE_SERVERKEY, keyring.of(server))
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keyring.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keyring.secret)


def refused() -> int:
    """How many connections with an unknown key were turned away."""
    return sum(guard.refused for guard in _state.guards.values())


def _authenticator(context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
    authenticator = _state.authenticators.get(id(context))
    if authenticator is None:
        authenticator = _state.authenticators[id(context)] = ThreadAuthenticator(context)
        authenticator.start()
    return authenticator


def _read(path: Path) -> tuple[bytes, bytes | None]:
    try:
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise KeysUnusable(f"{path}: {error}") from error
