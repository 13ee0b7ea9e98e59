"""Real processes die, freeze and end: no token is lost, repeated or changed, and nothing is left behind."""

import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from radixfleet.local_server import LocalServer
from tests.system.processes import descendants, eventually
from tests.system.servers import serving

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]


def service_pid(server: LocalServer, name: str) -> int:
    return next(p for p, command in descendants(server.process.pid).items() if f"services.{name}" in command)


def ready(server: LocalServer) -> bool:
    return httpx.get(f"{server.url}/ready", timeout=10).status_code == 200


def stream(server: LocalServer, tokens: int) -> Iterator[tuple[str, list[int]]]:
    """Cumulative (text, ids) of one greedy answer."""
    body = {
        "text": "Once upon a time, in a village by the sea,",
        "stream": True,
        "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
    }
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                event = json.loads(line[6:])
                assert "error" not in event, event
                yield event["text"], event["output_ids"]


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with serving("--dtype", "float32", "--max-total-tokens", "4096") as running:
        yield running


@pytest.mark.parametrize("name", ["detokenizer", "gpu_worker", "scheduler"])
def test_kill_9_in_mid_stream_changes_nothing(server: LocalServer, name: str) -> None:
    assert eventually(lambda: ready(server))
    undisturbed = list(stream(server, 48))[-1]
    texts: list[str] = []
    last: tuple[str, list[int]] = ("", [])
    killed = False
    for last in stream(server, 48):
        texts.append(last[0])
        if len(last[1]) >= 8 and not killed:
            os.kill(service_pid(server, name), signal.SIGKILL)
            killed = True
    assert killed
    assert last == undisturbed
    assert all(after.startswith(before) for before, after in itertools.pairwise(texts))
    assert eventually(lambda: ready(server))


def test_a_killed_tokenizer_comes_back_on_the_same_port(server: LocalServer) -> None:
    assert eventually(lambda: ready(server))
    os.kill(service_pid(server, "tokenizer"), signal.SIGKILL)
    assert eventually(lambda: ready(server))
    assert list(stream(server, 4))[-1][1]


@pytest.mark.parametrize("name", ["gpu_worker", "scheduler", "detokenizer"])
def test_a_frozen_service_fails_ready_and_is_replaced(server: LocalServer, name: str) -> None:
    assert eventually(lambda: ready(server))
    frozen = service_pid(server, name)
    os.kill(frozen, signal.SIGSTOP)
    assert eventually(lambda: not ready(server), 5.0)
    assert eventually(lambda: ready(server))
    assert service_pid(server, name) != frozen


def test_pages_all_come_home(server: LocalServer) -> None:
    """After everything above: nothing runs, nothing waits, and flushing leaves every page free."""
    assert eventually(lambda: ready(server))
    assert eventually(lambda: httpx.get(f"{server.url}/flush_cache", timeout=10).status_code == 200)

    def all_free() -> bool:
        [worker] = httpx.get(f"{server.url}/workers", timeout=10).json()
        return bool(worker["pages_free"] == worker["num_pages"] and worker["running"] == 0)

    assert eventually(all_free)
    metrics = httpx.get(f"{server.url}/metrics", timeout=10).text
    violations = [line for line in metrics.splitlines() if "invariant_violations" in line and line[0] != "#"]
    assert all(float(line.rsplit(" ", 1)[1]) == 0 for line in violations), violations


def test_sigterm_leaves_nothing(tmp_path: Path) -> None:
    with serving("--max-total-tokens", "1024", "--run-dir", str(tmp_path)) as server:
        children = descendants(server.process.pid)
        assert len(children) >= 4
        assert list(tmp_path.iterdir())
        assert server.stop() == 0
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert not list(tmp_path.iterdir())


def test_kill_9_of_the_launcher_leaves_nothing(tmp_path: Path) -> None:
    with serving("--max-total-tokens", "1024", "--run-dir", str(tmp_path)) as server:
        children = descendants(server.process.pid)
        server.process.kill()
        server.process.wait()

        def gone() -> bool:
            return not any(Path(f"/proc/{pid}").exists() for pid in children) and not list(tmp_path.iterdir())

        assert eventually(gone, 20.0)
