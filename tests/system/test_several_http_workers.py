"""Two HTTP processes behind one port with keys and HTTPS, on the real model: it makes no difference who answers."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families

from tests.system.servers import serving

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

KEYS = """
alice  sk-alice
bob    sk-bob
carol  sk-carol  2
dave   sk-dave   -  120
"""
LONG = "The quick brown fox jumps over the lazy dog and runs through the dark forest. " * 8


class Doors:
    """One connection to each of the two processes."""

    def __init__(self, url: str, trust: ssl.SSLContext) -> None:
        self._url = url
        self._trust = trust
        self.by_process: dict[str, httpx.Client] = {}
        while len(self.by_process) < 2:  # the kernel spreads connections evenly
            client = self.connect("sk-admin")
            process = next(iter(scrape(client, "radixfleet_scheduler_up")))
            if process in self.by_process:
                client.close()
            self.by_process.setdefault(process, client)

    def connect(self, key: str) -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self._url, verify=self._trust, headers=headers, timeout=60)

    def close(self) -> None:
        for client in self.by_process.values():
            client.close()


def scrape(client: httpx.Client, name: str) -> dict[str, float]:
    text = client.get("/metrics").text
    found = [s for family in text_string_to_metric_families(text) for s in family.samples if s.name == name]
    return {sample.labels.get("tenant") or sample.labels["service_id"]: sample.value for sample in found}


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    folder = tmp_path_factory.mktemp("door")
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
    keys = write_keys(folder)
    flags = ("--http-workers", "2", "--api-key-file", keys, "--admin-api-key", "sk-admin")
    with serving(*flags, "--ssl-certfile", str(folder / "both.pem"), "--max-total-tokens", "8192") as server:
        trust = ssl.create_default_context()
        authority.configure_trust(trust)
        opened = Doors(server.url.replace("http:", "https:"), trust)
        yield opened
        opened.close()


def write_keys(folder: Path) -> str:
    path = folder / "keys"
    path.write_text(KEYS)
    path.chmod(0o600)
    return str(path)


def generate(
    client: httpx.Client, max_tokens: int = 4, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    body = {"text": "Once upon a time", "sampling_params": sampling, **fields}
    return client.post("/generate", json=body, headers=headers)


def test_keys_hold_at_every_door(doors: Doors) -> None:
    assert set(doors.by_process) == {"tokenizer-0", "tokenizer-1"}
    for client in doors.by_process.values():
        for headers, status in (({"authorization": ""}, 401), ({"authorization": "Bearer sk-alice"}, 200)):
            assert client.get("/v1/models", headers=headers).status_code == status
        assert client.get("/health", headers={"authorization": ""}).status_code == 200
        assert client.post("/flush_cache", headers={"authorization": "Bearer sk-alice"}).status_code == 403


def test_a_cache_of_ones_own_behind_every_door(doors: Doors) -> None:
    cached = {}
    for key in ("sk-alice", "sk-bob"):
        for process, client in doors.by_process.items():
            headers = {"authorization": f"Bearer {key}"}
            body = {"text": LONG, "sampling_params": {"temperature": 0, "max_new_tokens": 2}}
            meta = client.post("/generate", json=body, headers=headers).json()["meta_info"]
            cached[key, process] = meta["cached_tokens"]
    first, second = doors.by_process
    assert cached["sk-alice", first] == cached["sk-bob", first] == 0
    assert cached["sk-alice", second] > 50
    assert cached["sk-bob", second] > 50


@pytest.mark.parametrize("n", [1, 3])
def test_an_abort_through_the_other_door_reaches_every_choice(doors: Doors, n: int) -> None:
    here, there = doors.by_process.values()
    started = threading.Event()
    ends: dict[int, str] = {}

    def read() -> None:
        body = {"text": "Once upon a time", "rid": f"story-{n}", "stream": True}
        sampling = {"temperature": 1.0, "max_new_tokens": 1500, "ignore_eos": True, "n": n}
        with here.stream("POST", "/generate", json={**body, "sampling_params": sampling}) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    started.set()
                    event = json.loads(line.removeprefix("data: "))
                    if event["meta_info"]["finish_reason"]:
                        ends[event.get("index", 0)] = event["meta_info"]["finish_reason"]["type"]

    reader = threading.Thread(target=read)
    reader.start()
    assert started.wait(60)
    there.post("/abort_request", json={"rid": f"story-{n}"})
    reader.join(60)
    assert ends == dict.fromkeys(range(n), "abort")


def test_budgets_are_shared_by_the_doors(doors: Doors) -> None:
    here, there = doors.by_process.values()
    carol = {"authorization": "Bearer sk-carol"}
    body = {"text": "x", "sampling_params": {"max_new_tokens": 1}}
    statuses = [client.post("/generate", json=body, headers=carol).status_code for client in (here, there, here)]
    assert statuses == [200, 200, 429]
    refused = there.post("/generate", json=body, headers=carol)
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    dave = {"authorization": "Bearer sk-dave"}
    spent = {"text": "x", "sampling_params": {"max_new_tokens": 200, "ignore_eos": True}}
    assert here.post("/generate", json=spent, headers=dave).status_code == 200
    refused = there.post("/generate", json=body, headers=dave)
    assert refused.status_code == 429
    assert "120 tokens a minute" in refused.json()["error"]["message"]


def test_a_session_goes_on_at_the_other_door(doors: Doors) -> None:
    here, there = doors.by_process.values()
    session = here.post("/open_session", json={"capacity_of_str_len": 1000}).json()
    first = generate(here, session_params={"id": session}).json()["meta_info"]
    second = generate(there, session_params={"id": session, "rid": first["id"]}).json()["meta_info"]
    assert second["prompt_tokens"] == 2 * first["prompt_tokens"] + first["completion_tokens"]
    assert second["cached_tokens"] >= first["prompt_tokens"]


def test_time_outs(doors: Doors) -> None:
    client = next(iter(doors.by_process.values()))
    answer = generate(client, 8000, timeout=3.0)
    assert answer.status_code == 408
    body = {"prompt": "Once", "max_tokens": 8000, "ignore_eos": True, "timeout": 3.0, "stream": True}
    answer = client.post("/v1/completions", json={**body, "stream_options": {"include_usage": True}})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    *chunks, usage, error, done = lines
    assert done == "[DONE]"
    assert json.loads(error)["error"]["code"] == "request_timeout"
    assert json.loads(usage)["usage"]["completion_tokens"] > 0


def test_metrics_are_of_all(doors: Doors) -> None:
    here, there = doors.by_process.values()
    name = "radixfleet_tenant_requests_total"
    before = scrape(here, name)["alice"]
    for client in (here, there):
        assert generate(client, headers={"authorization": "Bearer sk-alice"}).status_code == 200
    for client in (here, there):
        while scrape(client, name)["alice"] < before + 2:  # as soon as the next status is there
            client.get("/health")
        assert scrape(client, name)["alice"] == before + 2
        assert set(scrape(client, "radixfleet_http_requests_total")) == set(doors.by_process)
        info = client.get("/get_server_info").json()
        assert "sk-" not in json.dumps(info)
        assert info["internal_states"][0]["memory_usage"]["token_capacity"] == 8192
