"""A stand-in for a server that programs run on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from radixfleet import RuntimeEndpoint, set_default_backend
from tests.radixfleet.fake_model_server import FakeServer, fake_model_server, wait_until


@pytest.fixture(params=[True, None], ids=["scripts", "requests"])
def fake(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """The default backend: a server with scripts, and one without. Afterwards no thread of a program is left."""
    monkeypatch.setattr("radixfleet.lang.executor.LOOK_AHEAD_S", 3.0)  # chains do not depend on the machine's load
    with fake_model_server() as server:
        server.scripts = request.param
        endpoint = RuntimeEndpoint(server.url, timeout=20)
        set_default_backend(endpoint)
        yield server
        wait_until(lambda: not program_threads())
        endpoint.close()


def program_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("radixfleet")]
