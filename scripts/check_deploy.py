"""Brings docker-compose.yml up with a real engine and tries what docs/deploy.md promises. `make check-deploy`.

    build -> sizes -> up -> healthy -> a chat -> three workers -> one killed mid-stream -> it joins again -> down

Uses the engine that answers, or starts one of its own with docker_engine.sh. Exit code 0: all of it held.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
PROJECT = "radixfleetcheck"
BASE = "python:3.11-slim"
SERVICES = ("scheduler", "tokenizer", "detokenizer", "gpu_worker")
SMALL = ("scheduler", "tokenizer", "detokenizer")
SMALL_MB = 300
HEALTHY_S = 300
GRACE_S = 45
TOKENS = 96
PROMPT = "Write a long story about a lighthouse keeper and the sea."


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


class CheckFailed(Exception):
    pass


def require(condition: bool, text: str) -> None:
    if not condition:
        raise CheckFailed(text)
    say(f"ok: {text}")


def run(*command: str, quiet: bool = True, check: bool = True) -> str:
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=quiet, check=False)
    if check and done.returncode:
        raise CheckFailed(f"{' '.join(command)}\n{done.stdout or ''}{(done.stderr or '')[-3000:]}")
    return (done.stdout or "").strip()


def until(what: str, seconds: float, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise CheckFailed(f"not within {seconds:g} s: {what}")
        time.sleep(0.5)  # an engine has nothing to wait on for this
    say(f"ok: {what}")


def docker_answers() -> bool:
    try:
        return subprocess.run(["docker", "version"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def compose_commands() -> list[list[str]]:
    """What there is: the plugin, and the older program."""
    found = []
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        found.append(["docker", "compose"])
    if shutil.which("docker-compose"):
        found.append(["docker-compose"])
    require(bool(found), "a compose command is there")
    return found


class Deployment:
    """One project of compose, and the HTTP port it publishes."""

    def __init__(self, compose: list[str], port: int) -> None:
        self._compose = [*compose, "-p", PROJECT]
        self.url = f"http://127.0.0.1:{port}"
        self._http = httpx.Client(base_url=self.url, timeout=120, trust_env=False)

    def compose(self, *words: str) -> str:
        return run(*self._compose, *words)

    def containers(self, service: str) -> list[str]:
        label = f"label=com.docker.compose.service={service}"
        project = f"label=com.docker.compose.project={PROJECT}"
        return run("docker", "ps", "--no-trunc", "-q", "--filter", label, "--filter", project).split()

    def healthy(self, service: str, count: int) -> bool:
        ids = self.containers(service)
        if len(ids) != count:
            return False
        states = run("docker", "inspect", "-f", "{{.State.Health.Status}}", *ids).split()
        return states == ["healthy"] * count

    def workers(self) -> dict[str, int]:
        """Workers that the scheduler knows -> requests running there, from /metrics."""
        found = {}
        for line in self._http.get("/metrics").text.splitlines():
            if line.startswith("radixfleet_worker_running{"):
                labels, value = line.rsplit(" ", 1)
                found[labels.split('worker="')[1].split('"')[0]] = int(float(value))
        return found

    def ready(self) -> bool:
        try:
            return self._http.get("/ready").status_code == 200
        except httpx.HTTPError:
            return False

    def chat(self, after_chunks: Callable[[int], None] = lambda _: None) -> str:
        """The streamed answer; `after_chunks(n)` is called after the n-th piece of text."""
        body: dict[str, Any] = {"model": "default", "messages": [{"role": "user", "content": PROMPT}], "stream": True}
        body |= {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
        pieces: list[str] = []
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    if event.get("choices") and event["choices"][0]["delta"].get("content"):
                        pieces.append(event["choices"][0]["delta"]["content"])
                        after_chunks(len(pieces))
        return "".join(pieces)


def build(no_build: bool) -> None:
    if not no_build:
        for service in SERVICES:
            started = time.monotonic()
            run("docker", "build", "--network", "host", "-f", "deploy/docker/Dockerfile", "--target", service,
                "-t", f"radixfleet/{service}:latest", ".")  # fmt: skip
            say(f"built {service} in {time.monotonic() - started:.0f} s")
    base = size_mb(BASE)
    for service in SERVICES:
        over = size_mb(f"radixfleet/{service}") - base
        say(f"size: {service} {over:.0f} MB over the base of {base:.0f} MB")
        if service in SMALL:
            require(over < SMALL_MB, f"{service} is under {SMALL_MB} MB over the base")


def size_mb(image: str) -> float:
    return int(run("docker", "image", "inspect", "-f", "{{.Size}}", image)) / 1e6


def seed_models() -> None:
    """What this machine's cache has need not be fetched again inside."""
    cache = Path(os.environ.get("RADIXFLEET_CACHE", Path.home() / ".cache" / "radixfleet")) / "models"
    if not cache.is_dir():
        return
    run("docker", "run", "--rm", "--user", "0", "--entrypoint", "sh", "-v", f"{cache}:/from:ro",
        "-v", f"{PROJECT}_models:/to", "radixfleet/scheduler", "-c",
        "mkdir -p /to/models && cp -r /from/. /to/models/ && chown -R 10001:10001 /to")  # fmt: skip
    say(f"models of {cache} copied into the volume")


def kill_busy_worker(deployment: Deployment) -> Callable[[int], None]:
    """On the 30th piece of text: the container that computes the stream is killed."""

    def after_chunks(count: int) -> None:
        if count != 30:
            return
        until("the scheduler says who computes the stream", 20, lambda: any(deployment.workers().values()))
        name = next(name for name, running in deployment.workers().items() if running)
        victim = next(c for c in deployment.containers("gpu_worker") if c.startswith(name.removeprefix("worker-")))
        run("docker", "kill", "--signal", "KILL", victim)
        say(f"killed {name} mid-stream")

    return after_chunks


def check(deployment: Deployment) -> None:
    deployment.compose("up", "-d", "--no-build")
    for service in SERVICES:
        until(f"{service} is healthy", HEALTHY_S, lambda service=service: deployment.healthy(service, 1))
    until("the door is ready", 60, deployment.ready)
    undisturbed = deployment.chat()
    require(len(undisturbed) > TOKENS, f"a chat streamed through all four services: {undisturbed[:60]!r}...")

    deployment.compose("up", "-d", "--no-build", "--no-recreate", "--scale", "gpu_worker=3")
    until("three workers have joined", HEALTHY_S, lambda: len(deployment.workers()) == 3)
    require(deployment.chat(kill_busy_worker(deployment)) == undisturbed, "the text is the undisturbed one")
    until("the dead worker is gone", 30, lambda: len(deployment.workers()) == 2)
    deployment.compose("up", "-d", "--no-build", "--no-recreate", "--scale", "gpu_worker=3")
    until("a worker has joined again", HEALTHY_S, lambda: len(deployment.workers()) == 3)

    scale = ["--scale", "gpu_worker=3", "--scale", "tokenizer=2", "--scale", "detokenizer=2"]
    deployment.compose("up", "-d", "--no-build", "--no-recreate", *scale)
    for service in ("tokenizer", "detokenizer"):
        until(f"two of {service} are healthy", HEALTHY_S, lambda service=service: deployment.healthy(service, 2))
    require(deployment.chat() == undisturbed, "two front doors and two detokenizers serve the same text")


def stop(deployment: Deployment) -> None:
    ids = [c for service in SERVICES for c in deployment.containers(service)]
    started = time.monotonic()
    deployment.compose("stop", "-t", str(GRACE_S))
    seconds = time.monotonic() - started
    codes = run("docker", "inspect", "-f", "{{.State.ExitCode}}", *ids).split()
    # Whoever is not through within its grace time is killed and ends with 137. The scheduler stops after the others.
    require(codes == ["0"] * len(ids), f"every service ended within its grace time, exit codes {' '.join(codes)}")
    say(f"all {len(ids)} stopped in {seconds:.0f} s")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--no-build", action="store_true", help="the images are there")
    parser.add_argument("--keep", action="store_true", help="leave an engine of our own running")
    options = parser.parse_args()
    started = time.monotonic()
    engine = not docker_answers()
    deployment: Deployment | None = None
    try:
        if engine:
            os.environ["DOCKER_HOST"] = run(str(ROOT / "scripts" / "docker_engine.sh"), "up").splitlines()[-1]
            say("an engine of our own runs")
        commands = compose_commands()
        port = free_port()
        os.environ.update(RADIXFLEET_PORT=str(port), RADIXFLEET_DTYPE="float32", RADIXFLEET_THREADS="1",
                          RADIXFLEET_MAX_TOTAL_TOKENS="8192")  # fmt: skip
        for command in commands:
            run(*command, "-f", "docker-compose.yml", "-f", "docker-compose.cuda.yml", "config")
            say(f"ok: {' '.join(command)} accepts the files")
        build(options.no_build)
        deployment = Deployment(commands[0], port)
        deployment.compose("down", "-v")
        seed_models()
        check(deployment)
        stop(deployment)
    except CheckFailed as error:
        say(f"FAILED: {error}")
        if deployment is not None:
            print(run(*deployment._compose, "logs", "--tail", "40", check=False))
        return 1
    finally:
        if deployment is not None:
            run(*deployment._compose, "down", "-v", check=False)
        if engine and not options.keep:
            run(str(ROOT / "scripts" / "docker_engine.sh"), "down", check=False)
    say(f"all of it held, in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
