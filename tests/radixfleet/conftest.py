"""A stand-in for a server that programs run on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from radixfleet import RuntimeEndpoint, set_default_backend
from tests.radixfleet.fake_model_server import FakeServer, fake_model_server, wait_until


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """The default backend of the test; afterwards no thread of a program is left."""
    with fake_model_server() as server:
        endpoint = RuntimeEndpoint(server.url, timeout=20)
        set_default_backend(endpoint)
        yield server
        wait_until(lambda: not program_threads())
        endpoint.close()


def program_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("radixfleet")]
