"""Several HTTP processes behind one port: each supervised, none of them the only one. With fake services."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from radixfleet.errors import CommandError
from radixfleet.listen import listen
from tests.radixfleet.test_launcher import Serve

pytestmark = pytest.mark.timeout(90)
DOORS = {"tokenizer-0", "tokenizer-1", "tokenizer-2"}


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    runs: list[Serve] = []

    def start(*flags: str, **environment: str) -> Serve:
        runs.append(Serve(tmp_path, *flags, **environment))
        return runs[-1]

    yield start
    for run in runs:
        run.kill_everybody()


def test_all_of_them_serve_one_is_replaced_and_all_end_first(serve: Callable[..., Serve]) -> None:
    run = serve("--http-workers", "3")
    run.until_ready()
    assert set(run.pids) >= DOORS
    assert [run.get() for _ in range(30)] == [200] * 30
    old = run.pids["tokenizer-1"]
    os.kill(old, signal.SIGKILL)
    run.until("tokenizer-1 was killed by SIGKILL")
    assert [run.get() for _ in range(30)] == [200] * 30  # its connections wait for the next one
    run.until("fake tokenizer-1 started")
    assert run.pids["tokenizer-1"] != old
    run.signal(signal.SIGTERM)
    assert run.end() == 0
    closed = run.events("closed")
    assert set(closed[:3]) == DOORS
    assert closed[-1] == "scheduler"
    run.assert_nothing_left()


def test_one_that_fails_at_first_ends_everything(serve: Callable[..., Serve]) -> None:
    run = serve("--http-workers", "2", FAKE_TOKENIZER_1="fail")
    assert run.end() == 1
    assert run.said("tokenizer-1 ended with code 1 before the server was ready")
    run.assert_nothing_left()


def test_a_port_that_others_share_is_not_taken_from_them() -> None:
    with (
        socket.create_server(("127.0.0.1", 0), reuse_port=True) as other,
        pytest.raises(CommandError, match="taken by another program"),
        listen("127.0.0.1", other.getsockname()[1], 2),
    ):
        raise AssertionError("two programs would share their clients")
    with listen("127.0.0.1", 0, 3) as sockets:
        assert len({each.getsockname() for each in sockets}) == 1


def test_files_of_keys_and_certificates_are_looked_for_before_anything_starts(serve: Callable[..., Serve]) -> None:
    for flag in ("--api-key-file", "--ssl-certfile", "--ssl-keyfile"):
        run = serve(flag, "/nowhere")
        assert run.end() == 1
        assert run.said(f"radixfleet: error: {flag} /nowhere: no such file")
        assert run.pids == {}
