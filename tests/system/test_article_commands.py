"""The commands that introduce the server, as they are printed but for the package, the model's path and the port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from radixfleet.local_server import free_port

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
WITH_METRICS = r"""python3 -m radixfleet.launch_server \
  --model-path meta-llama/Llama-3-8b-chat-hf \
  --host 0.0.0.0 --port 30000 \
  --log-level info \
  --enable-metrics"""
QUIET = (
    "python3 -m radixfleet.launch_server --model-path meta-llama/Llama-3-8b-chat-hf "
    "--host 0.0.0.0 --port 30000 --log-level warning"
)
FIRST = r"""curl -X POST "http://localhost:30000/generate" \
  -H "Content-Type: application/json" \
  -d '{
    "text": "system: 你是一个助手。用户：今天北京天气如何？",
    "sampling_params": {"max_new_tokens": 30}
  }'"""
SECOND = r"""curl -X POST "http://localhost:30000/generate" \
  -H "Content-Type: application/json" \
  -d '{
    "text": "system: 你是一个助手。用户：今天北京天气如何？模型：晴，25度。用户：适合穿什么衣服？",
    "sampling_params": {"max_new_tokens": 30}
  }'"""
READY = ("Application startup complete.", "Uvicorn running on http://0.0.0.0:")


def adapted(command: str, model: Path, port: int) -> str:
    command = command.replace("python3", sys.executable, 1).replace("30000", str(port))
    return command.replace("meta-llama/Llama-3-8b-chat-hf", str(model))


@contextmanager
def running(command: str) -> Iterator[str]:
    """The server's output up to the line that the articles show last."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if "ready to roll" in line:
            break
    rest = threading.Thread(target=process.stdout.read, daemon=True)
    rest.start()
    try:
        assert "ready to roll" in lines[-1], "".join(lines)
        yield "".join(lines)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
        rest.join(10)
        process.stdout.close()


def counters(url: str) -> dict[str, float]:
    text = httpx.get(f"{url}/metrics").text
    found = {}
    for line in (
        r"sglang_cache_hit_total\{type=\"radix\"\}",
        r"sglang_cache_miss_total\{type=\"radix\"\}",
        "sglang_decode_tokens_total",
    ):
        [value] = re.findall(rf"^{line} ([0-9.e+]+)$", text, re.MULTILINE)
        found[line.partition("_total")[0]] = float(value)
        assert f"# TYPE {line.partition('_total')[0]}_total counter" in text
    return found


def test_a_server_with_metrics_and_two_similar_requests(model_dir: Path) -> None:
    port = free_port()
    url = f"http://localhost:{port}"
    with running(adapted(WITH_METRICS, model_dir, port)) as output:
        assert all(words in output for words in READY)
        before = counters(url)
        for command in (FIRST, SECOND):
            asked = adapted(command, model_dir, port)
            done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stderr
            assert '"text":' in done.stdout
        patience = threading.Event()
        after = counters(url)
        for _ in range(100):  # the picture behind /metrics is sent once a second
            if after["sglang_decode_tokens"] > before["sglang_decode_tokens"] + 2:
                break
            patience.wait(0.2)
            after = counters(url)
        assert after["sglang_cache_hit"] - before["sglang_cache_hit"] > 10
        assert after["sglang_cache_miss"] > before["sglang_cache_miss"]


def test_a_quiet_server(model_dir: Path) -> None:
    port = free_port()
    with running(adapted(QUIET, model_dir, port)) as output:
        assert "Started server process [" in output
        assert all(words in output for words in READY)


def test_the_version_is_printed() -> None:
    script = "import radixfleet\nprint(radixfleet.__version__)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", done.stdout)
