"""Builds the four images from wheels fetched once, all targets at a time, and measures them. Tries nothing."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import tomllib
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from deploy_phases import ROOT, CheckFailed, require, run, say, succeeds

BASE = "python:3.11-slim"
PYTHON = "3.11"
SERVICES = ("scheduler", "tokenizer", "detokenizer", "gpu_worker")
SMALL = ("scheduler", "tokenizer", "detokenizer")
SMALL_MB = 300
TAG = "check"
TORCH = os.environ.get("TORCH", "torch==2.13.0")
TORCH_INDEX = os.environ.get("TORCH_INDEX", "")
ARGUMENTS = {"PYTHON": PYTHON, "TORCH": TORCH, "TORCH_INDEX": TORCH_INDEX}


def image(service: str) -> str:
    return f"radixfleet/{service}:{TAG}"


class Wheels:
    """Everything that the images install, fetched by pip with its cache while other things are done."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._error: CheckFailed | None = None
        self._thread = threading.Thread(target=self._fetch, daemon=True)
        self._thread.start()

    def _fetch(self) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        wanted = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["worker"]]
        wanted += [*project["build-system"]["requires"], TORCH]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "--no-input", "--python-version", PYTHON]
        command += ["--extra-index-url", TORCH_INDEX] if TORCH_INDEX else []
        try:
            run(*command, "--dest", str(self._folder), *wanted)
        except CheckFailed as error:
            self._error = error

    @contextlib.contextmanager
    def served(self) -> Iterator[dict[str, str]]:
        """The build arguments with which pip takes them. Raises CheckFailed when they could not be fetched."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        handler = partial(_Quiet, directory=str(self._folder))
        with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield {"PIP_FIND_LINKS": f"http://127.0.0.1:{server.server_address[1]}/", "PIP_NO_INDEX": "1"}
            server.shutdown()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def write_override(path: Path, arguments: dict[str, str]) -> None:
    """What the check adds to docker-compose.yml: how to build here, and health asked for more often."""
    services = {}
    for service in SERVICES:
        build = {"context": str(ROOT), "network": "host", "args": {**ARGUMENTS, **arguments}}
        often = {"interval": "2s" if service == "scheduler" else "4s"}
        services[service] = {"build": build, "healthcheck": often}
    path.write_text(json.dumps({"services": services}, indent=1))


def build(override: Path, arguments: dict[str, str]) -> None:
    if succeeds("docker", "buildx", "version"):
        run(
            "docker", "buildx", "bake", "--load", "--progress", "plain", "-f", "docker-compose.yml", "-f", str(override)
        )
        return
    words = [word for name, value in {**ARGUMENTS, **arguments}.items() for word in ("--build-arg", f"{name}={value}")]
    for service in ("gpu_worker", *SMALL):  # the first one's stages serve the others
        run("docker", "build", "--network", "host", "-f", "deploy/docker/Dockerfile", "--target", service, *words,
            "-t", image(service), ".")  # fmt: skip


def measure() -> None:
    base = _size_mb(BASE)
    for service in SERVICES:
        over = _size_mb(image(service)) - base
        say(f"size: {service} {over:.0f} MB over the base of {base:.0f} MB")
        if service in SMALL:
            require(over < SMALL_MB, f"{service} is under {SMALL_MB} MB over the base")


def _size_mb(name: str) -> float:
    return int(run("docker", "image", "inspect", "-f", "{{.Size}}", name)) / 1e6


def remove() -> None:
    for service in SERVICES:
        run("docker", "image", "rm", image(service), check=False)
