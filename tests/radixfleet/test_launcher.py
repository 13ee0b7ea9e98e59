"""The launcher with fake services: order, restarts, limits, and nothing left behind, however it ends."""

from __future__ import annotations

import http.client
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from radixfleet.launch import READY_LINE
from radixfleet.local_server import free_port

pytestmark = pytest.mark.timeout(90)

FAKES = Path(__file__).parent / "fakes"
ROOT = Path(__file__).parents[2]
TOLD = re.compile(r"fake (\S+) (\w+) (\d+)")  # anywhere: lines of several processes may run into each other
ALL = {"scheduler", "detokenizer", "worker-0", "tokenizer"}


def heed_signals() -> None:
    """The tests may run under nohup or in the background, where these are ignored and the launcher respects that."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Serve:
    """One run of the launcher; its output is read line by line, and its end is the end of everybody's output."""

    def __init__(self, tmp_path: Path, *flags: str, **environment: str) -> None:
        self.port = free_port()
        self.sockets = tmp_path / "s"
        marks = tmp_path / "marks"
        marks.mkdir(exist_ok=True)
        model = tmp_path / "model"
        model.mkdir(exist_ok=True)
        for name in ("config.json", "tokenizer.json"):
            (model / name).write_text("{}")
        self.lines: list[str] = []
        self.pids: dict[str, int] = {}
        common = ("--host", "127.0.0.1", "--port", str(self.port), "--run-dir", str(self.sockets))
        chosen = flags if any("--model-path" in flag for flag in flags) else ("--model-path", str(model), *flags)
        self.process = subprocess.Popen(
            [sys.executable, str(FAKES / "serve_fakes.py"), *common, *chosen],
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}:{FAKES}",
                "FAKE_MARKS": str(marks),
                "RADIXFLEET_HEARTBEAT_INTERVAL": "0.2",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=heed_signals,
        )

    def until(self, wanted: Callable[[str], bool] | str) -> str:
        """The first new line that is wanted; fails where output ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._note(line)
            if wanted in line if isinstance(wanted, str) else wanted(line):
                return line
        raise AssertionError(f"never seen {wanted!r}:\n" + "".join(self.lines))

    def until_ready(self) -> None:
        self.until(READY_LINE)

    def end(self) -> int:
        """Read until nobody holds our pipe any more; the exit code."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._note(line)
        return self.process.wait()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def said(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def events(self, event: str) -> list[str]:
        return [name for line in self.lines for name, what, _ in TOLD.findall(line) if what == event]

    def get(self) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request("GET", "/")
        try:
            return connection.getresponse().status
        finally:
            connection.close()

    def kill_everybody(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        for line in self.process.stdout or ():
            self._note(line)
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.process.wait()

    def assert_nothing_left(self) -> None:
        assert [name for name, pid in self.pids.items() if not has_ended(pid)] == []
        assert not self.sockets.exists() or list(self.sockets.iterdir()) == []
        with socket.create_server(("127.0.0.1", self.port)):
            pass

    def _note(self, line: str) -> None:
        self.lines.append(line)
        self.pids.update((name, int(pid)) for name, what, pid in TOLD.findall(line) if what == "started")


def has_ended(pid: int) -> bool:
    """Also of the dead that nobody has collected yet: orphans wait for the machine's first process."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 5)[0])
    finally:
        os.close(descriptor)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Serve]]:
    runs: list[Serve] = []

    def start(*flags: str, **environment: str) -> Serve:
        runs.append(Serve(tmp_path, *flags, **environment))
        return runs[-1]

    yield start
    for run in runs:
        run.kill_everybody()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_serves_until_a_signal_and_ends_in_order(serve: Callable[..., Serve], number: int) -> None:
    run = serve()
    run.until_ready()
    assert set(run.pids) == ALL
    assert run.get() == 200
    url = run.until("http://")
    assert url.strip() == f"http://127.0.0.1:{run.port}"
    run.signal(number)
    assert run.end() == 0
    closed = run.events("closed")
    assert closed[0] == "tokenizer"
    assert closed[-1] == "scheduler"
    assert set(closed) == ALL, "".join(run.lines)
    run.assert_nothing_left()


def test_several_workers_share_the_machine(serve: Callable[..., Serve]) -> None:
    run = serve("--workers", "3", "--skip-server-warmup")
    run.until_ready()
    assert {"worker-0", "worker-1", "worker-2"} < set(run.pids)
    run.signal(signal.SIGTERM)
    assert run.end() == 0


def test_a_start_that_is_not_complete_can_be_stopped(serve: Callable[..., Serve]) -> None:
    run = serve(FAKE_WORKER_0="silent")
    for _ in ALL:
        run.until("started")
    run.signal(signal.SIGTERM)
    assert run.end() == 0
    assert not run.said(READY_LINE)
    run.assert_nothing_left()


@pytest.mark.parametrize("name", ["scheduler", "worker-0"])
def test_a_service_that_fails_at_first_ends_everything_with_the_reason(serve: Callable[..., Serve], name: str) -> None:
    run = serve(**{"FAKE_" + name.replace("-", "_").upper(): "fail", "FAKE_TOKENIZER": "broken"})
    assert run.end() == 1
    assert run.said(f"radixfleet: error: {name} ended with code 1 before the server was ready")
    assert run.said("told to fail")
    assert not run.said(READY_LINE)
    run.assert_nothing_left()


def test_a_failed_warm_up_ends_everything(serve: Callable[..., Serve]) -> None:
    run = serve(FAKE_TOKENIZER="broken")
    assert run.end() == 1
    assert run.said("the warm-up request failed with status 500")
    run.assert_nothing_left()


def test_a_dead_service_is_started_again_and_the_port_stays_ours(serve: Callable[..., Serve]) -> None:
    run = serve()
    run.until_ready()
    for name in ("worker-0", "tokenizer"):
        old = run.pids[name]
        os.kill(old, signal.SIGKILL)
        run.until(f"{name} was killed by SIGKILL")
        run.until(f"fake {name} started")
        assert run.pids[name] != old
    assert run.get() == 200
    run.signal(signal.SIGTERM)
    assert run.end() == 0
    run.assert_nothing_left()


def test_a_service_that_keeps_dying_ends_everything(serve: Callable[..., Serve]) -> None:
    run = serve(FAKE_WORKER_0="fail-later")
    run.until_ready()
    os.kill(run.pids["worker-0"], signal.SIGKILL)
    assert run.end() == 1
    assert run.said("for the 5th time within 60 s")
    assert run.events("started").count("worker-0") == 5
    run.assert_nothing_left()


def test_a_frozen_service_is_replaced(serve: Callable[..., Serve]) -> None:
    run = serve("--frozen-timeout", "2")
    run.until_ready()
    old = run.pids["detokenizer"]
    os.kill(old, signal.SIGSTOP)
    run.until("detokenizer has been silent")
    run.until("fake detokenizer started")
    assert run.pids["detokenizer"] != old
    run.signal(signal.SIGTERM)
    assert run.end() == 0


def test_nobody_survives_a_killed_launcher(serve: Callable[..., Serve]) -> None:
    run = serve(FAKE_SCHEDULER="stubborn")
    run.until_ready()
    run.signal(signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    run.assert_nothing_left()


def test_the_second_signal_ends_at_once(serve: Callable[..., Serve]) -> None:
    run = serve(FAKE_TOKENIZER="stubborn")
    run.until_ready()
    run.signal(signal.SIGINT)
    run.until("fake tokenizer drains")
    run.signal(signal.SIGINT)
    assert run.end() == 128 + signal.SIGINT
    assert run.events("closed") == []
    run.assert_nothing_left()


def test_a_service_that_does_not_drain_is_killed_in_the_end(serve: Callable[..., Serve]) -> None:
    run = serve("--drain-timeout", "0.1", FAKE_DETOKENIZER="stubborn")
    run.until_ready()
    run.signal(signal.SIGTERM)
    assert run.end() == 0
    assert run.said("detokenizer did not end within")
    run.assert_nothing_left()


def test_a_taken_port_is_said_before_anything_starts(serve: Callable[..., Serve], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        run = serve("--port", str(other.getsockname()[1]))
        assert run.end() == 1
    assert run.said("is taken by another program")
    assert run.pids == {}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--model-path", "/nowhere"), "no such model file or folder: /nowhere"),
        (("--host", "256.1.1.1"), "cannot listen on 256.1.1.1"),
        (("--run-dir", "/proc/nothing"), "/proc"),
        (("--run-dir", "/tmp/" + "x" * 120), "too long"),
        (("--tokenizer-path", "/nowhere"), "/nowhere"),
        (("--chat-template", "/nowhere"), "/nowhere"),
    ],
)
def test_bad_settings_are_said_and_nothing_starts(
    serve: Callable[..., Serve], flags: tuple[str, ...], reason: str
) -> None:
    run = serve(*flags)
    assert run.end() == 1
    assert any(line.startswith("radixfleet: error: ") and reason in line for line in run.lines)
    assert run.pids == {}
    assert not run.said("Traceback")


@pytest.fixture
def waiting_for_model(tmp_path: Path, serve: Callable[..., Serve]) -> Iterator[Serve]:
    """A launcher whose model is being prepared by somebody else for ever."""
    import fcntl

    from radixfleet.models import small_model
    from radixfleet.models.store import CONVERTER_VERSION

    models = tmp_path / "cache" / "models"
    models.mkdir(parents=True)
    name = f".{small_model.NAME}-{small_model.SHA256[:12]}-v{CONVERTER_VERSION}.lock"
    with (models / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run = serve("--model-path=", RADIXFLEET_CACHE=str(tmp_path / "cache"))
        run.until("another process is preparing this model")
        yield run


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_preparing_the_model_can_be_interrupted(waiting_for_model: Serve, number: int, code: int) -> None:
    waiting_for_model.signal(number)
    assert waiting_for_model.end() == code
    waiting_for_model.assert_nothing_left()
