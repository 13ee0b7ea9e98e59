"""Servers under test: real processes on a free port, one at a time."""

from collections.abc import Iterator
from contextlib import contextmanager

from radixfleet.local_server import LocalServer


@contextmanager
def serving(*flags: str, env: dict[str, str] | None = None) -> Iterator[LocalServer]:
    """`radixfleet serve` with these flags, ready."""
    with LocalServer("--log-level", "info", "--skip-server-warmup", *flags, env=env) as server:
        yield server
