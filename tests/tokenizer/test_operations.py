"""Health, descriptions, metrics and an operator's commands."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import jsonschema
import msgspec
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from shared.messages.control import ServiceMetrics
from shared.metrics import Histogram
from tests.tokenizer.conftest import Launcher
from tests.tokenizer.fake_backend import FakeBackend, endless
from tests.tokenizer.tiny_folder import CONTEXT, VOCAB_SIZE


async def test_models(client: httpx.AsyncClient, model_folder: Any) -> None:
    body = (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    [model] = body["data"]
    assert model["id"] == "tiny"
    assert model["object"] == "model"
    assert model["max_model_len"] == CONTEXT
    assert model["owned_by"] == "radixfleet"
    for name in ("tiny", "default", str(model_folder).lstrip("/")):
        answer = await client.get(f"/v1/models/{name}")
        assert answer.status_code == (200 if not name.startswith("tmp") else 404)
    missing = (await client.get("/v1/models/other")).json()["error"]
    assert (missing["param"], missing["code"]) == ("model", "model_not_found")


async def test_accepted_names_of_the_model(client: httpx.AsyncClient, model_folder: Any) -> None:
    for name in ("tiny", "default", str(model_folder), None):
        answer = await client.post("/v1/completions", json={"prompt": "x", "model": name, "max_tokens": 1})
        assert answer.status_code == 200, name


async def test_descriptions(client: httpx.AsyncClient, model_folder: Any) -> None:
    for path in ("/get_model_info", "/model_info"):
        info = (await client.get(path)).json()
        assert info["model_path"] == str(model_folder)
        assert info["is_generation"] is True
        assert {"tokenizer_path", "preferred_sampling_params", "weight_version"} <= info.keys()
    for path in ("/get_server_info", "/server_info"):
        info = (await client.get(path)).json()
        assert info["max_total_num_tokens"] == 1600
        [state] = info["internal_states"]
        assert {"weight", "kvcache", "token_capacity", "graph"} <= state["memory_usage"].keys()
        assert state["last_gen_throughput"] == 12.5
        assert info["version"]
        assert info["port"] == 0


async def test_monitors_may_ask_for_the_head_alone(client: httpx.AsyncClient) -> None:
    for path in ("/health", "/ready", "/ping"):
        answer = await client.head(path)
        assert (answer.status_code, answer.content) == (200, b""), path


async def test_load_and_workers(client: httpx.AsyncClient) -> None:
    [load] = (await client.get("/get_load")).json()
    assert load == {"dp_rank": 0, "worker_id": "w1", "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 320}
    [worker] = (await client.get("/workers")).json()
    assert worker["worker_id"] == "w1"
    assert worker["num_pages"] == 100


async def test_health(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    for path in ("/health", "/ready", "/health_generate"):
        assert (await client.get(path)).status_code == 200
    [request] = backend.requests
    assert request.sampling.max_tokens == 1
    await backend.until(lambda: backend.acked)


async def test_flush_cache(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    for method in ("GET", "POST"):
        answer = await client.request(method, "/flush_cache")
        assert answer.status_code == 200
        assert answer.text.startswith("Cache flushed.")
    backend.flush_ok = False
    answer = await client.post("/flush_cache")
    assert answer.status_code == 400
    assert "2 requests are running" in answer.json()["error"]["message"]
    assert answer.json()["error"]["code"] == "cache_in_use"
    assert {operation.name for operation in backend.operations} == {"flush_cache"}


async def test_tokenize_and_back(client: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello 你好").ids
    body = (await client.post("/tokenize", json={"prompt": "hello 你好"})).json()
    assert body == {"tokens": ids, "count": len(ids), "max_model_len": CONTEXT}
    body = (await client.post("/v1/tokenize", json={"prompt": ["hello 你好", ""]})).json()
    assert (body["tokens"], body["count"]) == ([ids, []], [len(ids), 0])
    assert (await client.post("/detokenize", json={"tokens": ids})).json() == {"text": "hello 你好"}
    assert (await client.post("/v1/detokenize", json={"tokens": [ids, [2]]})).json() == {"text": ["hello 你好", ""]}
    body = {"tokens": [2], "skip_special_tokens": False}
    assert (await client.post("/detokenize", json=body)).json() == {"text": "<|im_end|>"}
    assert (await client.post("/detokenize", json={"tokens": [VOCAB_SIZE - 1]})).json() == {"text": ""}


def samples(text: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def value(found: dict[str, list[Any]], name: str) -> float:
    [sample] = found[name]
    return float(sample.value)


async def test_metrics(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    queue = Histogram()
    queue.observe(0.003)
    other = Histogram()
    other.observe(0.5, times=2)
    services = (
        ServiceMetrics("scheduler", "s", {"cpu_seconds": 1.5}, {"queue_time": queue.snapshot()}),
        ServiceMetrics("tokenizer", "t9", {}, {"time_to_first_token_seconds": other.snapshot()}),
        ServiceMetrics("worker", "w1", {"busy": 0.25}, {}, 0.1),
    )
    backend.publish(services=services)
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 4}, "stream": True}
    await client.post("/generate", json=body)
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert 'sglang_cache_hit_total{type="radix"} 892.0' in answer.text
    assert 'sglang_cache_miss_total{type="radix"} 108.0' in answer.text
    assert re.search(r"^sglang_decode_tokens_total 1200.0$", answer.text, re.M)
    found = samples(answer.text)
    for name in (
        *("num_running_reqs", "num_used_tokens", "token_usage", "gen_throughput", "num_queue_reqs"),
        *("cache_hit_rate", "max_total_num_tokens", "spec_accept_length", "num_retracted_reqs"),
        *("new_token_ratio", "is_cuda_graph", "num_paused_reqs", "engine_startup_time", "engine_load_weights_time"),
        *("prompt_tokens_total", "generation_tokens_total", "cached_tokens_total", "num_requests_total"),
        *("num_aborted_requests_total", "evicted_tokens_total", "time_to_first_token_seconds_bucket"),
        *("inter_token_latency_seconds_count", "e2e_request_latency_seconds_sum", "queue_time_seconds_count"),
    ):
        assert found[f"sglang:{name}"], name
        assert found[f"sglang:{name}"][0].labels["model_name"] == "tiny"
    assert value(found, "sglang:num_used_tokens") == 320
    assert value(found, "sglang:token_usage") == 0.2
    assert value(found, "sglang:time_to_first_token_seconds_count") == 3
    assert value(found, "sglang:queue_time_seconds_count") == 1
    assert value(found, "radixfleet_scheduler_up") == 1
    assert value(found, "radixfleet_worker_pages_free") == 60
    [busy] = found["radixfleet_service_busy"]
    assert (busy.value, busy.labels["service"], busy.labels["service_id"]) == (0.25, "worker", "w1")
    bounds = [float(s.labels["le"]) for s in found["sglang:time_to_first_token_seconds_bucket"]]
    assert min(bounds) == 0.001
    assert max(bounds) == float("inf")
    assert value(found, "sglang:num_so_requests_total") == 3
    fine = [float(s.labels["le"]) for s in found["radixfleet_mask_row_seconds_bucket"]]
    assert min(fine) == 0.00001
    assert 0.005 in [float(s.labels["le"]) for s in found["radixfleet_scheduler_loop_cpu_seconds_bucket"]]


async def test_gauges_fall_when_all_leave(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.script = endless
    running = [asyncio.ensure_future(client.post("/generate", json={"text": "x"})) for _ in range(5)]
    await backend.until(lambda: backend.live == 5)
    backend.publish()
    while value(samples((await client.get("/metrics")).text), "sglang:num_running_reqs") != 5:
        await asyncio.sleep(0.05)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    async with asyncio.timeout(10):
        while value(samples((await client.get("/metrics")).text), "sglang:num_running_reqs"):
            await asyncio.sleep(0.05)
    found = samples((await client.get("/metrics")).text)
    assert value(found, "radixfleet_http_requests_active") == 0


async def test_metrics_outlive_the_scheduler(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    await backend.stop()
    async with asyncio.timeout(5):
        while value(samples((await client.get("/metrics")).text), "radixfleet_scheduler_up"):
            await asyncio.sleep(0.05)
    found = samples((await client.get("/metrics")).text)
    assert value(found, "sglang:num_running_reqs") == 0
    assert value(found, "sglang_decode_tokens_total") == 1200
    await backend.start()


async def test_openapi_describes_the_bodies(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    components = document["components"]["schemas"]
    for path, name in (("/v1/chat/completions", "ChatBody"), ("/generate", "GenerateBody")):
        content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
        assert content["schema"] == {"$ref": f"#/components/schemas/{name}"}
    schema = {**components["ChatBody"], "components": {"schemas": components}}
    jsonschema.validate({"messages": [{"role": "user", "content": "x"}], "stop": ["a"], "n": None}, schema)
    refs = set(re.findall(r"#/components/schemas/(\w+)", msgspec.json.encode(document).decode()))
    assert refs <= components.keys()


async def test_requests_are_logged_when_asked(launch: Launcher, capsys: Any) -> None:
    service = await launch(log_requests=True)
    async with httpx.AsyncClient(base_url=service.url) as client:
        await client.post("/generate", json={"text": "secret words"}, headers={"x-request-id": "id-7"})
    said = capsys.readouterr()
    assert "id-7" in said.out + said.err
    assert "secret words" not in said.out + said.err


async def test_a_worker_is_drained_by_name(client: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer = await client.post("/workers/w1/drain")
    assert answer.status_code == 200
    assert answer.json()["status"] == "ok"
    assert [(o.name, o.argument) for o in backend.operations] == [("drain_worker", "w1")]
    backend.refuse = "drain_worker"
    answer = await client.post("/workers/nobody/drain")
    assert answer.status_code == 404
    assert (await client.get("/workers/w1/drain")).status_code == 405
