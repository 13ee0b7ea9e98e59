"""Workers placed on a cluster, against a fake of Ray's interface with real processes behind it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from radixfleet import launchers_ray
from radixfleet.launchers_ray import Placement, reachable, variables_for_nodes
from radixfleet.options import parse
from radixfleet.plan import Front, child_specs
from tests.deploy.fake_ray import FakeRay
from tests.system.processes import eventually

WORKER = """
import os, signal, sys, time
folder = os.environ["RADIXFLEET_TRACE"]
def stop(number, frame):
    open(os.path.join(folder, f"drained-{os.getpid()}"), "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
with open(os.path.join(folder, f"started-{os.getpid()}"), "w") as file:
    file.write(" ".join(sys.argv[1:]))
while True:
    signal.pause()
"""


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package `radixfleet` on the nodes whose `worker` command only says that it was there."""
    package = tmp_path / "nodes" / "radixfleet"
    package.mkdir(parents=True)
    root = Path(launchers_ray.__file__).parent
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(WORKER)
    for name in ("launchers_ray.py", "orphan.py"):
        (package / name).write_text((root / name).read_text())
    monkeypatch.setenv("RADIXFLEET_TRACE", str(tmp_path))
    return tmp_path


def started(trace: Path) -> list[Path]:
    return [path for path in trace.glob("started-*") if path.read_text()]


def test_workers_run_are_replaced_and_drain_when_cancelled(trace: Path) -> None:
    ray = FakeRay(trace / "nodes")
    placement = Placement(ray, ["--scheduler", "tcp://h:5560"], {"RADIXFLEET_DTYPE": "float32"}, {"num_gpus": 1.0})
    assert ray.options == {"num_gpus": 1.0, "max_retries": -1}
    placement.place(0)
    placement.place(1)
    assert eventually(lambda: len(started(trace)) == 2)
    assert started(trace)[0].read_text() == "worker --scheduler tcp://h:5560"
    os.kill(int(started(trace)[0].name.removeprefix("started-")), signal.SIGKILL)
    placement.look(20)
    assert eventually(lambda: len(started(trace)) == 3)
    placement.cancel()
    assert all(reference.process.poll() is not None for reference in ray.references)
    assert len(list(trace.glob("drained-*"))) == 2


def test_the_process_ends_its_workers_on_sigterm(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(trace / "nodes")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.delenv("RADIXFLEET_PARENT_FD", raising=False)

    def stop_when_started() -> None:
        assert eventually(lambda: len(started(trace)) == 3)
        os.kill(os.getpid(), signal.SIGTERM)

    watcher = threading.Thread(target=stop_when_started)
    watcher.start()
    try:
        words = ["--workers", "3", "--scheduler", "tcp://0.0.0.0:5560", "--model", "some/model"]
        assert launchers_ray.main(words, ray) == 0
    finally:
        watcher.join()
        for number, handler in before.items():
            signal.signal(number, handler)
    assert ray.down
    assert len(list(trace.glob("drained-*"))) == 3
    assert {path.read_text() for path in started(trace)} == {
        "worker --scheduler tcp://127.0.0.1:5560 --model-path some/model"
    }


def test_serve_plans_one_placing_process_instead_of_workers(tmp_path: Path) -> None:
    options = parse(["m/x", "--launcher", "ray", "--workers", "8", "--device", "cuda", "--api-key", "k"], environ={})
    specs = {spec.name: spec for spec in child_specs(options, tmp_path, tmp_path, Front([7]))}
    assert set(specs) == {"scheduler", "detokenizer", "workers-on-ray", "tokenizer"}
    words = list(specs["workers-on-ray"].argv)
    assert words[:4] == [sys.executable, "-P", "-m", "radixfleet.launchers_ray"]
    assert words[4:] == [
        *("--workers", "8", "--scheduler", "tcp://0.0.0.0:5560", "--address", "auto"),
        *("--model", "m/x", "--gpus", "1"),
    ]
    assert specs["scheduler"].env["RADIXFLEET_WORKER_BIND"] == "tcp://0.0.0.0:5560"
    assert "RADIXFLEET_API_KEY" not in specs["workers-on-ray"].env


def test_what_stays_on_this_machine() -> None:
    environ = {
        "PATH": "/bin",
        "RADIXFLEET_DTYPE": "float16",
        "RADIXFLEET_MODEL_PATH": "/here",
        "RADIXFLEET_RUN_DIR": "/r",
    }
    assert variables_for_nodes(environ) == {"RADIXFLEET_DTYPE": "float16"}
    assert reachable("tcp://*:5560", "10.0.0.7") == "tcp://10.0.0.7:5560"
    assert reachable("tcp://10.1.1.1:5560", "10.0.0.7") == "tcp://10.1.1.1:5560"
