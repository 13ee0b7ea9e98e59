"""Programs against the real server and the small model: started by Runtime, used, stopped."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

import radixfleet
from radixfleet import (
    BackendError,
    Engine,
    OpenAI,
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
from tests.system.counters import let_settle
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
    let_settle(url)
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


@function
def reasoned(s: Any, question: str) -> None:
    s += system("You are brief.")
    s += user(question)
    s += assistant("In short," + gen("one", max_tokens=8, stop=["."]))
    s += user("Why <|im_end|> that?")
    s += assistant(gen("two", max_tokens=6) + " Sure? " + select("sure", ["yes", "no"]) + gen("three", max_tokens=4))


def test_a_chain_is_one_request_with_the_same_ids(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once as a script, once step by step: the same prompts token by token, every one of them found in the cache."""
    monkeypatch.setattr("radixfleet.lang.executor.LOOK_AHEAD_S", 60.0)  # however slow the machine is
    outcomes, requests = [], []
    for options in (Optimizations(script=False), Optimizations()):
        flush_cache()
        before = http_requests(runtime.url)
        state = reasoned.run(question="What is the capital of France?", temperature=0, optimize=options)
        requests.append(http_requests(runtime.url) - before - 1)
        metas = [state.get_meta_info(name) for name in ("one", "two", "three")]
        outcomes.append((state.text(), [meta["prompt_tokens"] for meta in metas]))
        for earlier, later in pairwise(metas):
            known = earlier["prompt_tokens"] + earlier["completion_tokens"]
            assert later["cached_tokens"] >= known - 3  # but for the last token, and a token that a stop string cut
    assert outcomes[0] == outcomes[1]
    assert requests[1] == 1
    assert requests[0] > 4


def test_a_batch_of_scripts(runtime: Runtime) -> None:
    items = [{"question": f"What about {i % 3}?"} for i in range(6)]
    scripted = reasoned.run_batch(items, temperature=0)
    single = reasoned.run_batch(items, temperature=0, optimize=Optimizations(script=False))
    assert [state.text() for state in scripted] == [state.text() for state in single]
    pieces = list(reasoned.run(**items[0], temperature=0, stream=True).text_iter())
    assert "".join(pieces) == single[0].text()
    assert len(pieces) > 10


def test_a_script_fails_in_the_middle(runtime: Runtime) -> None:
    @function
    def program(s: Any) -> None:
        s += "x" + gen("a", max_tokens=2) + " word" * 9000 + gen("b")

    with pytest.raises(BackendError, match="longer than the maximum context length") as failure:
        program.run()
    assert failure.value.status == 400


def test_pins(runtime: Runtime) -> None:
    """A batch holds its prefix while it runs, and lets it go."""
    held = []

    @function
    def program(s: Any, question: str) -> None:
        s += RULES + question + gen("a", max_tokens=2)
        s += gen("look", api_url=lambda: held.append(pinned(runtime.url)) or ".")

    program.run_batch([{"question": str(i)} for i in range(2)], num_threads=1)
    assert eventually(lambda: pinned(runtime.url) == 0)
    request = {"text": RULES, "sampling_params": {"max_new_tokens": 0}, "pin": "mine", "pin_seconds": 60}
    assert httpx.post(f"{runtime.url}/generate", json=request, timeout=60).status_code == 200
    assert eventually(lambda: pinned(runtime.url) > 40)
    assert httpx.post(f"{runtime.url}/unpin", json={"pin": "mine"}).status_code == 200
    assert eventually(lambda: pinned(runtime.url) == 0)


def pinned(url: str) -> float:
    return metric(url, "radixfleet_scheduler_pinned_tokens")


def http_requests(url: str) -> float:
    return metric(url, "radixfleet_http_requests_total")


def metric(url: str, name: str) -> float:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition(" ")[0].partition("{")[0] == name)


@pytest.mark.parametrize("chat", [True, False])
def test_the_openai_backend_against_our_own_server(runtime: Runtime, chat: bool) -> None:
    backend = OpenAI("default", is_chat_model=chat, base_url=f"{runtime.url}/v1", api_key="none")

    @function
    def talk(s: Any) -> None:
        s += system("You are brief.") + user("What is the capital of France?")
        s += assistant(gen("one", max_tokens=12))
        s += user("Sure?") + assistant(select("sure", ["yes", "no"]))

    @function
    def write(s: Any) -> None:
        s += "The capital of France is" + gen("one", max_tokens=12, stop=".") + ". That is "
        s += select("sure", ["true", "false"]) + gen("two", max_tokens=4)

    program = talk if chat else write
    state = program.run(backend=backend, temperature=0)
    assert state["one"] == program.run(temperature=0)["one"]
    assert state["sure"] in ("yes", "no", "true", "false")
    streamed = program.run(backend=backend, temperature=0, stream=True)
    assert "".join(streamed.text_iter("one")) == state["one"]
    streamed.sync()
    with pytest.raises(BackendError, match="no regex"):
        judged_with_regex.run(backend=backend)
    backend.close()


@function
def judged_with_regex(s: Any) -> None:
    s += "x" + gen("a", regex="a+")


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
        # Not by a JSON parser: the article's \s is also white space that JSON does not know.
        name, age, city = r'"name"\s*:\s*"[^"]+"', r'"age"\s*:\s*\d+', r'"city"\s*:\s*"[^"]+"'
        assert re.fullmatch(rf"\{{\s*{name}\s*,\s*{age}\s*,\s*{city}\s*\}}\n", written)


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
