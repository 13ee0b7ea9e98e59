"""Programs against the real server and the small model: started by Runtime, used, stopped."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import radixfleet
from radixfleet import (
    BackendError,
    Engine,
    Optimizations,
    Runtime,
    assistant,
    flush_cache,
    function,
    gen,
    get_server_info,
    select,
    set_default_backend,
    system,
    user,
)
from radixfleet.local_server import ServerFailed
from tests.radixfleet.fake_weather import fake_weather
from tests.radixfleet.test_lang_articles import JSON_PROGRAM, TRIP_PROGRAM
from tests.system.processes import eventually

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
EXAMPLES = Path(__file__).parents[2] / "examples" / "programs"
RULES = "You answer questions about cities, briefly and politely, and never invent what you do not know. " * 3


@pytest.fixture(scope="module")
def runtime(model_dir: Path) -> Iterator[Runtime]:
    """Deterministic, so that results can be compared whatever runs beside them."""
    flags: dict[str, Any] = {"deterministic": True, "max_total_tokens": 16384, "skip_server_warmup": True}
    with Runtime(model_path=str(model_dir), **flags) as server:
        set_default_backend(server)
        yield server
    with pytest.raises(BackendError, match="was closed"):
        server.get_server_info()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


@pytest.fixture
def weather() -> Iterator[Any]:
    with fake_weather() as server:
        yield server


@function
def judged(s: Any, context: str, question: str) -> None:
    s += RULES
    s += f"Context: {context}\nQ: {question}\nA:" + gen("answer", max_tokens=4, stop="\n")
    s += "\nIs that sure? " + select("sure", ["yes", "no", "perhaps"])


ITEMS = [{"context": f"report {i % 2}", "question": f"What about {i % 4}?"} for i in range(8)]


def counts(url: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        for key in ("sglang:num_requests_total", "sglang_cache_miss_total"):
            found[key] = found.get(key, 0.0) + (float(value) if name.startswith(key) else 0.0)
    return found


def test_optimisations_save_work_and_change_nothing(runtime: Runtime) -> None:
    outcomes, spent = [], []
    for options in (Optimizations.none(), Optimizations(share=True)):
        flush_cache()
        before = counts(runtime.url)
        states = judged.run_batch(ITEMS, temperature=0, optimize=options)
        after = counts(runtime.url)
        outcomes.append([(state.text(), state["sure"]) for state in states])
        spent.append({key: after[key] - before[key] for key in after})
    assert outcomes[0] == outcomes[1]
    assert all(spent[1][key] < spent[0][key] for key in spent[0])


def test_a_conversation_is_what_chat_completions_sees(runtime: Runtime) -> None:
    @function
    def chat(s: Any) -> None:
        s += system("You are brief.")
        s += user("What is the capital of France? <|im_end|>")
        s += assistant(gen("one", max_tokens=12))
        s += user("And of Italy?")
        s += assistant(gen("two", max_tokens=12))

    state = chat.run(temperature=0)
    body = {"messages": state.messages()[:2], "max_tokens": 12, "temperature": 0}
    answer = httpx.post(f"{runtime.url}/v1/chat/completions", json=body, timeout=300).json()
    assert answer["choices"][0]["message"]["content"] == state["one"]
    assert answer["usage"]["prompt_tokens"] == state.get_meta_info("one")["prompt_tokens"]
    meta = state.get_meta_info("two")
    assert meta["cached_tokens"] >= state.get_meta_info("one")["prompt_tokens"]


def test_stream_and_errors(runtime: Runtime) -> None:
    state = judged.run(**ITEMS[0], temperature=0, stream=True)
    assert "".join(state.text_iter()) == state.text()
    with pytest.raises(BackendError, match="longer than the maximum context length"):
        judged.run(context="x" * 100_000, question="?")
    assert get_server_info()["ready"] is True


@pytest.mark.parametrize(
    "name", ["few_shot", "chat_turns", "tips", "react", "trip", "tree_of_thought", "parallel_json"]
)
def test_examples(runtime: Runtime, name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), runtime.url]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_json_program_of_the_article(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(radixfleet, "Runtime", lambda model_path: runtime, raising=False)
    for _ in range(3):
        exec(compile(JSON_PROGRAM, "article", "exec"), {})
        written = capsys.readouterr().out
        assert set(json.loads(written, strict=False)) == {"name", "age", "city"}


def test_the_trip_program_of_the_article(runtime: Runtime, weather: Any) -> None:
    namespace: dict[str, Any] = {}
    exec(compile(TRIP_PROGRAM, "article", "exec"), namespace)
    state = namespace["ret"]
    assert f"，日期：{state['date']}，天气：晴，25℃" in state.text()
    assert state.text().endswith(state["final_plan"])
    assert len(weather.asked) == 1


def test_engine(model_dir: Path) -> None:
    params = {"max_new_tokens": 4, "temperature": 0}
    with Engine(model_path=str(model_dir), max_total_tokens=4096, skip_server_warmup=True) as engine:
        one = engine.generate("The capital of France is", params)
        many = engine.generate(["The capital of France is", "Two plus two is"], params)
        assert one["text"] == many[0]["text"]
        events = list(engine.generate("The capital of France is", params, stream=True))
        assert events[-1]["meta_info"]["completion_tokens"] == 4

        async def main() -> Any:
            return await asyncio.gather(*(engine.async_generate(f"{i} and", params) for i in range(3)))

        assert len(asyncio.run(main())) == 3
        engine.flush_cache()


def test_a_model_that_does_not_exist() -> None:
    with pytest.raises(ServerFailed, match="no-such-model"):
        Runtime(model_path="/nowhere/no-such-model", ready_timeout=120)


def test_the_server_ends_with_a_process_that_is_killed(model_dir: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from radixfleet import Runtime\n"
        f"runtime = Runtime(model_path={str(model_dir)!r}, max_total_tokens=2048, skip_server_warmup=True)\n"
        "print(runtime.url, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == -9, done.stderr
    url = done.stdout.strip()

    def refused() -> bool:
        try:
            httpx.get(f"{url}/health", timeout=10)
        except httpx.ConnectError:
            return True
        except httpx.TransportError:
            return False  # cut off in the middle of an answer: on its way out
        return False

    assert eventually(refused), f"{url} still answers"
