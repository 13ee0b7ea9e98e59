"""Two real workers on the real model: one is lost, frozen or leaves in mid-stream; the text is the undisturbed one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from radixfleet.local_server import LocalServer
from tests.system.processes import descendants, eventually
from tests.system.prompts import long_prompt
from tests.system.servers import serving

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
TOKENS = 32


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    # A machine that is busy with other tests makes everybody silent for a while.
    flags = ("--dtype", "float32", "--max-total-tokens", "4096", "--workers", "2", "--frozen-timeout", "25")
    with serving(*flags) as running:
        yield running


def workers(server: LocalServer) -> dict[str, dict[str, Any]]:
    found = httpx.get(f"{server.url}/workers", timeout=10).json()
    return {worker["worker_id"]: worker for worker in found}


def pid_of(server: LocalServer, worker_id: str) -> int:
    for pid, command in descendants(server.process.pid).items():
        if "services.gpu_worker" in command:
            with open(f"/proc/{pid}/environ", "rb") as environ:
                if f"RADIXFLEET_SERVICE_ID={worker_id}".encode() in environ.read().split(b"\0"):
                    return pid
    raise AssertionError(f"{worker_id} does not run")


def answer(server: LocalServer, prompt: str, disturb: Callable[[], None] | None = None) -> tuple[str, list[int], int]:
    """(text, ids, cached tokens) of one greedy stream; `disturb` is called after some tokens."""
    params = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    body = {"text": prompt, "stream": True, "sampling_params": params}
    last: dict[str, Any] = {}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=120) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                last = json.loads(line[6:])
                assert "error" not in last, last
                if disturb is not None and len(last["output_ids"]) >= 6:
                    disturb()
                    disturb = None
    assert disturb is None
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": TOKENS}, last
    return last["text"], last["output_ids"], last["meta_info"]["cached_tokens"]


def busy(server: LocalServer) -> str:
    """The worker that computes the one request there is."""
    found: list[str] = []

    def look() -> bool:
        found[:] = [name for name, worker in workers(server).items() if worker["running"]]
        return bool(found)

    assert eventually(look)
    return found[0]


def both_ready(server: LocalServer) -> bool:
    found = workers(server)
    return len(found) == 2 and not any(worker["draining"] for worker in found.values())


@pytest.fixture(scope="module")
def undisturbed(server: LocalServer) -> dict[str, tuple[str, list[int], int]]:
    found = {}
    for what in ("drain", "SIGTERM", "SIGKILL", "SIGSTOP"):
        found[what] = answer(server, f"The story of {what}: {long_prompt(100)}")
    assert httpx.post(f"{server.url}/flush_cache", timeout=20).status_code == 200
    return found


@pytest.mark.parametrize("what", ["drain", "SIGTERM", "SIGKILL", "SIGSTOP"])
def test_a_request_goes_on_where_another_worker_is(
    server: LocalServer, undisturbed: dict[str, tuple[str, list[int], int]], what: str
) -> None:
    assert eventually(lambda: both_ready(server))
    gone: list[tuple[str, int]] = []

    def disturb() -> None:
        name = busy(server)
        pid = pid_of(server, name)
        gone.append((name, pid))
        if what == "drain":
            assert httpx.post(f"{server.url}/workers/{name}/drain", timeout=10).status_code == 200
        else:
            os.kill(pid, getattr(signal, what))

    text, ids, _ = answer(server, f"The story of {what}: {long_prompt(100)}", disturb)
    assert (text, ids) == undisturbed[what][:2]
    [(name, pid)] = gone
    if what == "SIGSTOP":
        os.kill(pid, signal.SIGKILL)  # the launcher would do it later
    assert eventually(lambda: not os.path.exists(f"/proc/{pid}")), f"{name} is still there"
    assert eventually(lambda: both_ready(server)), "it comes back"
    fields = workers(server)[name]
    assert fields["pages_free"] + fields["pages_held"] + fields["pages_cached"] == fields["num_pages"]
    assert {"device", "max_slots", "running", "queue", "inflight_steps", "heartbeat_age_s"} <= fields.keys()
    assert httpx.post(f"{server.url}/flush_cache", timeout=20).status_code == 200


def test_a_worker_that_nobody_knows_cannot_be_drained(server: LocalServer) -> None:
    assert httpx.post(f"{server.url}/workers/nobody/drain", timeout=10).status_code == 404
