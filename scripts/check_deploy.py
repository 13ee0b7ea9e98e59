"""Brings docker-compose.yml up with a real engine and tries what docs/deploy.md promises. `make check-deploy`.

    build -> sizes -> up -> healthy -> a chat -> three workers -> one killed mid-stream -> it joins again -> down

Uses the engine that answers and leaves it as it was, or starts one of its own with docker_engine.sh. Where both compose
programs are there, the plugin does all this and docker-compose 1.29 comes up, serves the same text and ends. Exit code
0: all of it held.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deploy_images
import httpx
from deploy_images import SERVICES
from deploy_phases import ROOT, CheckFailed, NoEngine, end_running, phases, require, run, say, succeeds, until

ENGINE = ROOT / "scripts" / "docker_engine.sh"
GRACE_S = 45
TOKENS = 96
PROMPT = "Write a long story about a lighthouse keeper and the sea."


def compose_commands() -> list[list[str]]:
    """What there is: the plugin, and the older program."""
    found = []
    if succeeds("docker", "compose", "version"):
        found.append(["docker", "compose"])
    if shutil.which("docker-compose"):
        found.append(["docker-compose"])
    require(bool(found), f"compose is there: {', '.join(' '.join(words) for words in found)}")
    return found


class Deployment:
    """One project of compose, and the HTTP port it publishes."""

    def __init__(self, compose: list[str], override: Path, port: int) -> None:
        self.program = " ".join(compose)
        self.project = "radixfleetcheck" + ("old" if compose == ["docker-compose"] else "")
        self._compose = [*compose, "-p", self.project, "-f", "docker-compose.yml", "-f", str(override)]
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False)

    def compose(self, *words: str, check: bool = True) -> str:
        return run(*self._compose, *words, check=check)

    def up(self, **scale: int) -> None:
        words = [word for service, count in scale.items() for word in ("--scale", f"{service}={count}")]
        self.compose("up", "-d", "--no-build", "--no-recreate", *words)

    def containers(self, service: str) -> list[str]:
        label = f"label=com.docker.compose.service={service}"
        project = f"label=com.docker.compose.project={self.project}"
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
        body["frequency_penalty"] = 0.01  # nothing is guessed, so that even an answer given before comes piece by piece
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


def seed_models(project: str) -> None:
    """What this machine's cache has need not be fetched again inside."""
    cache = Path(os.environ.get("RADIXFLEET_CACHE", Path.home() / ".cache" / "radixfleet")) / "models"
    if not cache.is_dir():
        return
    run("docker", "run", "--rm", "--user", "0", "--entrypoint", "sh", "-v", f"{cache}:/from:ro",
        "-v", f"{project}_models:/to", deploy_images.image("scheduler"), "-c",
        "mkdir -p /to/models && cp -r /from/. /to/models/ && chown -R 10001:10001 /to")  # fmt: skip
    say(f"models of {cache} copied into the volume")


def kill_busy_worker(deployment: Deployment) -> Callable[[int], None]:
    """On the 30th piece of text: the container that computes the stream is killed."""

    def after_chunks(count: int) -> None:
        if count != 30:
            return
        until("the scheduler says who computes the stream", lambda: any(deployment.workers().values()))
        name = next(name for name, running in deployment.workers().items() if running)
        victim = next(c for c in deployment.containers("gpu_worker") if c.startswith(name.removeprefix("worker-")))
        run("docker", "kill", "--signal", "KILL", victim)
        say(f"killed {name} mid-stream")

    return after_chunks


def first_chat(deployment: Deployment) -> str:
    with phases(f"up ({deployment.program})", 300):
        seed_models(deployment.project)
        deployment.up()
    with phases("healthy", 300):
        for service in SERVICES:
            until(f"{service} is healthy", lambda service=service: deployment.healthy(service, 1))
        until("the door is ready", deployment.ready)
    with phases("chat", 120):
        text = deployment.chat()
        require(len(text) > TOKENS, f"a chat streamed through all four services: {text[:60]!r}...")
    return text


def check(deployment: Deployment) -> str:
    undisturbed = first_chat(deployment)
    with phases("scale to three workers", 300):
        deployment.up(gpu_worker=3)
        until("three workers have joined", lambda: len(deployment.workers()) == 3)
    with phases("kill one mid-stream", 180):
        require(deployment.chat(kill_busy_worker(deployment)) == undisturbed, "the text is the undisturbed one")
        until("the dead worker is gone", lambda: len(deployment.workers()) == 2)
    with phases("it joins again", 300):
        deployment.up(gpu_worker=3)
        until("a worker has joined again", lambda: len(deployment.workers()) == 3)
    with phases("two doors and detokenizers", 300):
        deployment.up(gpu_worker=3, tokenizer=2, detokenizer=2)
        for service in ("tokenizer", "detokenizer"):
            until(f"two of {service} are healthy", lambda service=service: deployment.healthy(service, 2))
        require(deployment.chat() == undisturbed, "two front doors and two detokenizers serve the same text")
    return undisturbed


def stop(deployment: Deployment) -> None:
    ids = [c for service in SERVICES for c in deployment.containers(service)]
    started = time.monotonic()
    deployment.compose("stop", "-t", str(GRACE_S))
    seconds = time.monotonic() - started
    codes = run("docker", "inspect", "-f", "{{.State.ExitCode}}", *ids).split()
    # Whoever is not through within its grace time is killed and ends with 137. The scheduler stops after the others.
    require(codes == ["0"] * len(ids), f"every service ended within its grace time, exit codes {' '.join(codes)}")
    deployment.compose("down", "-v")
    say(f"all {len(ids)} stopped in {seconds:.0f} s")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start_engine(cleanup: contextlib.ExitStack, keep: bool) -> None:
    """What it sets up is undone by `cleanup`."""
    if not keep:
        cleanup.callback(run, str(ENGINE), "down", check=False)
    for line in run(str(ENGINE), "up").splitlines():
        name, equals, value = line.partition("=")
        if equals and name in ("DOCKER_HOST", "DOCKER_CONFIG"):
            os.environ[name] = value
    say("an engine of our own runs")


def prepare(cleanup: contextlib.ExitStack, folder: Path, options: argparse.Namespace) -> Path:
    """An engine and the images. Returns the compose file that the check adds."""
    override = folder / "check.yml"
    own_engine = not succeeds("docker", "version")
    wheels = None
    with phases("engine and base image", 600):
        if own_engine:
            wheels = None if options.no_build else deploy_images.Wheels(folder / "wheels")
            try:
                start_engine(cleanup, options.keep)
            except CheckFailed as error:
                raise NoEngine(str(error)) from None
    with phases("wheels", 600):  # fetched since the start; what is left of that
        arguments = cleanup.enter_context(wheels.served()) if wheels else {}
        deploy_images.write_override(override, arguments)
    if not options.no_build:
        if not own_engine and not options.keep:
            cleanup.callback(deploy_images.remove)
        with phases("images", 1200):
            deploy_images.build(override, arguments)
    with phases("sizes", 60):
        deploy_images.measure()
    return override


def try_all(cleanup: contextlib.ExitStack, override: Path) -> None:
    port = free_port()
    os.environ.update(RADIXFLEET_PORT=str(port), RADIXFLEET_DTYPE="float32", RADIXFLEET_THREADS="1",
                      RADIXFLEET_MAX_TOTAL_TOKENS="8192")  # fmt: skip
    with phases("compose files", 60):
        commands = compose_commands()
        for command in commands:
            run(*command, "-f", "docker-compose.yml", "-f", "docker-compose.cuda.yml", "config")
            say(f"ok: {' '.join(command)} accepts the files")
    text = ""
    for number, command in enumerate(commands):
        deployment = Deployment(command, override, port)
        with phases("clean start", 120):
            deployment.compose("down", "-v")
        cleanup.callback(deployment.compose, "down", "-v", "-t", "5", check=False)
        try:
            if number == 0:
                text = check(deployment)
            else:
                require(first_chat(deployment) == text, f"{deployment.program} serves the same text")
            with phases("stop and down", 2 * GRACE_S + 60):
                stop(deployment)
        except CheckFailed:
            print(deployment.compose("logs", "--tail", "40", check=False))
            raise


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-build", action="store_true", help="the images are there")
    parser.add_argument("--keep", action="store_true", help="leave the images, and an engine of our own running")
    parser.add_argument("--where-possible", action="store_true", help="end with 0, and a word, where no engine can run")
    parser.add_argument("--timings", action="store_true", help="say what each phase took, in seconds and CPU seconds")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ["RADIXFLEET_VERSION"] = deploy_images.TAG
    started = time.monotonic()
    failed: CheckFailed | None = None
    with tempfile.TemporaryDirectory(prefix="check-deploy-") as folder, contextlib.ExitStack() as cleanup:
        cleanup.callback(end_running)
        try:
            try_all(cleanup, prepare(cleanup, Path(folder), options))
        except CheckFailed as error:
            failed = error
            say(f"FAILED: {error}")
        with phases("cleanup", 300):
            cleanup.close()
    if options.timings:
        print(phases.table())
    say(f"{'not all' if failed else 'all'} of it held, in {time.monotonic() - started:.0f} s")
    if isinstance(failed, NoEngine) and options.where_possible:
        say("NOT TRIED: no container engine can run on this machine")
        return 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
