"""RadixFleet beside vLLM, a llama.cpp server and OpenVINO GenAI: same machine, weights, client and prompts, in one run.

    python benchmarks/peers.py [--peers vllm,llamacpp,openvino,unguessed] [--workloads w1,w2,w3,w4,w5] [--repeats 2]
        [--scale 1.0] [--install-only] [--out results.jsonl]

Installs each peer once under ~/.cache/radixfleet/peers, then runs the servers one at a time. Fails where a peer does
not install or start, where its log does not show 16-bit weights, where a request fails, and where greedy answers
disagree from the first tokens on. Prints each peer's ratio to ours: above 1 is in our favour. `unguessed` is our
own server without guesses of the next tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import load
from benchmarks.peer_servers import CACHE, NAME, OWN, PEERS, Models, Peer, installed, same_weights
from radixfleet.local_server import free_port
from radixfleet.models import resolve, small_model

START_S = 1200  # vLLM compiles at its first start
PROMPTS = ("The capital of France is", "Water boils at", "1, 2, 3, 4,", "Once upon a time there was")
AGREED_CHARS = 12  # of a greedy answer; 16-bit sums in another order may part ways later
AGREED_PROMPTS = 3
# What is compared of each workload, and whether less is better.
COLUMNS = {"w1": ("wall_s", True), "w2": ("wall_s", True), "w3": ("out_tok_s", False), "w4": ("ttft_p50_ms", True)}
COLUMNS["w5"] = ("wall_s", True)


class PeerFailed(RuntimeError):
    """A peer does not start, computes in another precision, or answers wrongly."""


def ask(url: str, body: dict[str, Any] | None = None, timeout: float = 60) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.load(response)


@contextlib.contextmanager
def running(peer: Peer, models: Models) -> Iterator[tuple[str, Path]]:
    """The peer's URL and log file, once it answers. Raises PeerFailed with the log's end."""
    folder, port = installed(peer), free_port()
    log = CACHE / f"{peer.name}.log"
    environ = {**os.environ, **peer.env(folder)}
    with log.open("wb") as sink:
        command = peer.command(folder, models, port)
        process = subprocess.Popen(command, stdout=sink, stderr=sink, env=environ, start_new_session=True)
        try:
            _await_ready(process, f"http://127.0.0.1:{port}", peer.name, log)
            yield f"http://127.0.0.1:{port}", log
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _await_ready(process: subprocess.Popen[bytes], url: str, name: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            ask(f"{url}/v1/completions", {"model": NAME, "prompt": "Hello", "max_tokens": 1, "temperature": 0})
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError, ValueError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
                break
    raise PeerFailed(f"{name} does not start:\n{log.read_text(errors='replace')[-3000:]}")


def greedy(url: str) -> list[str]:
    body = {"model": NAME, "max_tokens": 16, "temperature": 0}
    return [ask(f"{url}/v1/completions", {**body, "prompt": prompt})["choices"][0]["text"] for prompt in PROMPTS]


def check_answers(name: str, answers: list[str], ours: list[str]) -> int:
    agreed = sum(a[:AGREED_CHARS] == b[:AGREED_CHARS] for a, b in zip(answers, ours, strict=True))
    if agreed < AGREED_PROMPTS:
        raise PeerFailed(f"{name} answers otherwise than radixfleet:\n{answers}\n{ours}")
    return agreed


def measure(
    peer: Peer, models: Models, options: argparse.Namespace, repeat: int, ours: list[str]
) -> tuple[list[Any], list[str]]:
    started = time.monotonic()
    with running(peer, models) as (url, log):
        print(f"{peer.name}: ready after {time.monotonic() - started:.1f} s", flush=True)
        if not re.search(peer.proof, log.read_text(errors="replace")):
            raise PeerFailed(f"{peer.name}: the log does not show {peer.proof!r}")
        answers = greedy(url)
        agreed = check_answers(peer.name, answers, ours or answers)
        print(f"{peer.name}: 16-bit weights; {agreed} of {len(PROMPTS)} greedy answers begin alike", flush=True)

        def say(line: dict[str, Any]) -> None:
            print(f"  {peer.name} {json.dumps(line)}", flush=True)
            if line["errors"]:
                raise PeerFailed(f"{peer.name}: {line['first_error']}")
            if options.out:
                with options.out.open("a") as file:
                    file.write(json.dumps({"server": peer.name, **line, "repeat": repeat}) + "\n")

        # Nothing that was compiled or allocated lazily is measured.
        dialect = "radixfleet" if peer.name in OWN else peer.name
        arguments = (url, NAME, models.folder, dialect)
        asyncio.run(load.run(*arguments, workloads=["w2", "w5"], scale=0.1, seed=99))
        rest = {"workloads": options.workloads, "seed": repeat, "scale": options.scale, "say": say}
        return asyncio.run(load.run(*arguments, **rest)), answers


def table(results: dict[str, list[Any]]) -> None:
    own = medians(results["radixfleet"])
    print(f"\n{'':16}{'':14}" + "".join(f"{name:>20}" for name in results))
    for workload, value in own.items():
        column, less = COLUMNS[workload.split(".")[0]]
        cells = []
        for lines in results.values():
            other = medians(lines)[workload]
            ratio = other / value if less else value / other
            cells.append(f"{other:11.1f} ({ratio:5.2f}x)")
        print(f"{workload:16}{column:14}" + "".join(f"{cell:>20}" for cell in cells))


def medians(lines: list[Any]) -> dict[str, float]:
    """Each workload's figure, the median of its repeats."""
    found: dict[str, list[float]] = {}
    for line in lines:
        found.setdefault(line["workload"], []).append(line[COLUMNS[line["workload"].split(".")[0]][0]])
    return {workload: statistics.median(values) for workload, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=lambda s: s.split(","), default=["vllm", "llamacpp", "openvino", "unguessed"])
    parser.add_argument("--workloads", type=lambda s: s.split(","), default=list(COLUMNS))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--install-only", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    peers = [PEERS[name] for name in ("radixfleet", *options.peers)]
    for peer in peers:
        installed(peer)
    source = next(CACHE.glob("*Q4_1.gguf"), None) or small_model.fetch(CACHE, lambda text: print(text, file=sys.stderr))
    models = same_weights(Path(resolve()), source)
    if options.install_only:
        return
    results: dict[str, list[Any]] = {peer.name: [] for peer in peers}
    ours: list[str] = []
    # In turns, since a shared machine is not equally fast for the length of all runs.
    for repeat in range(options.repeats):
        for peer in peers:
            lines, answers = measure(peer, models, options, repeat, ours)
            results[peer.name] += lines
            ours = ours or answers
    table(results)


if __name__ == "__main__":
    try:
        main()
    except PeerFailed as failure:
        raise SystemExit(f"peers: {failure}") from None
