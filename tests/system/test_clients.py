"""What users come with: curl and the openai package, against the real model."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from radixfleet.local_server import LocalServer
from tests.system.counters import count, shown
from tests.system.processes import descendants, eventually
from tests.system.servers import serving

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with serving("--served-model-name", "small") as running:
        yield running


@pytest.fixture
def client(server: LocalServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def curl(*arguments: str) -> str:
    program = shutil.which("curl")
    assert program, "the tests need curl"
    done = subprocess.run([program, "--silent", "--no-buffer", *arguments], capture_output=True, check=True, timeout=60)
    return done.stdout.decode()


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="small", messages=QUESTION, temperature=0, max_tokens=32)  # type: ignore[arg-type]
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "small"
    again = client.chat.completions.create(model="small", messages=QUESTION, temperature=0, max_tokens=32)  # type: ignore[arg-type]
    assert again.choices[0].message.content == answer.choices[0].message.content
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens


def test_streamed_chat_is_the_same_text(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="small", messages=QUESTION, temperature=0, max_tokens=32)  # type: ignore[arg-type]
    chunks = list(
        client.chat.completions.create(
            model="small",
            messages=QUESTION,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=32,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens  # type: ignore[union-attr]


def test_completions_with_logprobs_and_choices(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="small", prompt="The capital of France is", max_tokens=6, n=2, seed=5, logprobs=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert len(choice.logprobs.token_logprobs) <= 6
        assert all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs)


def test_seeds_repeat_and_differ(client: openai.OpenAI) -> None:
    def text(seed: int) -> str:
        answer = client.completions.create(
            model="small", prompt="A story:", max_tokens=24, temperature=1.0, seed=seed, extra_body={"top_k": 50}
        )
        return answer.choices[0].text

    assert text(7) == text(7)
    assert len({text(seed) for seed in range(4)}) > 1


def test_errors_reach_the_sdk(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.chat.completions.create(model="nobody", messages=QUESTION)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="small", prompt="word " * 20_000)
    assert caught.value.code == "context_length_exceeded"


def test_an_aborted_request_keeps_its_answer(server: LocalServer) -> None:
    body = {"text": "Once upon a time", "rid": "mine", "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}}
    others = {"text": "Once", "rid": "mine-2", "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}}
    answers: dict[str, dict[str, Any]] = {}

    def ask(request: dict[str, Any]) -> None:
        answers[request["rid"]] = httpx.post(f"{server.url}/generate", json=request, timeout=120).json()

    threads = [threading.Thread(target=ask, args=(request,)) for request in (body, others)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: "mine-2" in answers)
    httpx.post(f"{server.url}/abort_request", json={"rid": "mine"}).raise_for_status()
    for thread in threads:
        thread.join(60)
    assert answers["mine"]["meta_info"]["finish_reason"]["type"] == "abort"
    assert answers["mine"]["meta_info"]["completion_tokens"] == len(answers["mine"]["output_ids"]) < 4000
    assert answers["mine-2"]["meta_info"]["finish_reason"] == {"type": "length", "length": 8}


def test_curl_streams_chat_and_generate(server: LocalServer) -> None:
    body = json.dumps({"messages": QUESTION, "stream": True, "max_tokens": 16, "temperature": 0})
    lines = curl(f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json", "-d", body).splitlines()
    events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    first = json.loads(events[0].removeprefix("data: "))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    body = json.dumps(
        {"text": "The capital city of France is", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    )
    answer = json.loads(curl(f"{server.url}/generate", "-H", "Content-Type: application/json", "-d", body))
    assert answer["meta_info"]["completion_tokens"] == 4


def test_metrics_count_hits_and_misses_in_tokens(server: LocalServer) -> None:
    def counter(name: str) -> float:
        lines = httpx.get(f"{server.url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    before = counter("sglang_cache_hit_total"), counter("sglang_cache_miss_total")
    body = {"text": "A prompt that nobody has sent before, twice.", "sampling_params": {"max_new_tokens": 2}}
    first = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()["meta_info"]
    second = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()["meta_info"]
    expected_hits = first["cached_tokens"] + second["cached_tokens"]
    expected_misses = first["prompt_tokens"] + second["prompt_tokens"] - expected_hits
    assert second["cached_tokens"] == second["prompt_tokens"]

    def counted() -> bool:
        hits, misses = counter("sglang_cache_hit_total"), counter("sglang_cache_miss_total")
        return hits - before[0] >= expected_hits and misses - before[1] >= expected_misses

    assert eventually(counted, 5.0)  # the picture is renewed a few times a second


def test_rows_that_share_a_prefix_read_it_once(server: LocalServer) -> None:
    """Eight rows over one long prompt read far fewer bytes of KV than eight times one row."""

    def read() -> float:
        steps = count(server.url, "steps")
        assert eventually(lambda: shown(server.url, "service_steps{") >= steps, 20.0)  # a heartbeat carries both
        return shown(server.url, "service_kv_bytes_read{")

    def read_for(prompts: list[str]) -> float:
        before = read()
        # Nothing is guessed beside a penalty: each token is a step, whatever was answered before.
        params = {"max_new_tokens": 32, "ignore_eos": True, "frequency_penalty": 0.01}
        answer = httpx.post(f"{server.url}/generate", json={"text": prompts, "sampling_params": params}, timeout=60)
        answer.raise_for_status()
        return read() - before

    prompt = "Count the birds on the roof, and tell me of each what it sings. " * 50
    read_for([prompt])
    assert read_for([prompt] * 8) < 0.5 * 8 * read_for([prompt])


SAMPLINGS = pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "sampling_seed": 5}])


@SAMPLINGS
def test_guesses_change_the_cost_and_not_the_answer(server: LocalServer, sampling: dict[str, float]) -> None:
    """Who wants scores is not guessed for, so its tokens come one by one."""

    def answer(**fields: object) -> list[int]:
        params = {**sampling, "max_new_tokens": 90, "ignore_eos": True}
        body = {"text": "red, green, blue, red, green, blue, red, green, ", "sampling_params": params, **fields}
        found: list[int] = httpx.post(f"{server.url}/generate", json=body, timeout=120).json()["output_ids"]
        return found

    before, one_by_one = count(server.url, "accepted_draft_tokens"), answer(return_logprob=True)
    assert len(one_by_one) == 90
    assert [answer() for _ in range(3)] == [one_by_one] * 3
    assert count(server.url, "accepted_draft_tokens") > before + 90


@SAMPLINGS
def test_guesses_under_a_schema_change_the_cost_and_not_the_answer(
    server: LocalServer, sampling: dict[str, float]
) -> None:
    """What earlier texts of a schema have in common is guessed of the later ones."""
    fields = {"first name": {"type": "string", "maxLength": 20}, "city of birth": {"enum": ["Rome", "Oslo", "Lima"]}}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}

    def answer(name: str, **wishes: object) -> list[int]:
        params = {**sampling, "max_new_tokens": 60, "json_schema": json.dumps(schema)}
        body = {"text": f"{name} was born in Rome. As JSON: ", "sampling_params": params, **wishes}
        found: list[int] = httpx.post(f"{server.url}/generate", json=body, timeout=120).json()["output_ids"]
        return found

    names = ["Maria", "Priya", "Chloe", "Hugo", "Nina"]
    before = count(server.url, "accepted_draft_tokens")
    one_by_one = [answer(name, return_logprob=True) for name in names]
    assert count(server.url, "accepted_draft_tokens") == before
    assert [answer(name) for name in names] == one_by_one
    assert count(server.url, "accepted_draft_tokens") > before + len(names)


def test_idle_uses_almost_no_cpu(server: LocalServer) -> None:
    """All processes together stay under 2 % of a core while nobody asks for anything."""

    def ticks() -> int:
        total = 0
        for pid in descendants(server.process.pid):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
        return total

    threading.Event().wait(1.0)  # what the last request left behind settles
    start = ticks()
    threading.Event().wait(10.0)
    assert (ticks() - start) / os.sysconf("SC_CLK_TCK") / 10.0 < 0.02
