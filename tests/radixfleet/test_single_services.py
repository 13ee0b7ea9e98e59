"""Single services and pings: the model is resolved, everything else is passed on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from radixfleet.errors import CommandError
from radixfleet.models import SMALL_MODEL_NAME
from radixfleet.single import prepare
from shared import ping
from shared.messages.control import Ping, Pong
from shared.messages.edges import FromDetokenizer
from shared.transport import Server


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("spelling", [["--model-path", "{}"], ["--model={}"], ["--model", "{}"]])
def test_the_model_becomes_a_folder_and_flags_pass(model: Path, spelling: list[str]) -> None:
    argv = ["--scheduler", "tcp://h:5560", *(word.format(model) for word in spelling), "--threads=2"]
    arguments, env = prepare("worker", argv, {"PATH": "/bin"})
    assert arguments == ["--scheduler", "tcp://h:5560", "--threads=2"]
    assert env == {"PATH": "/bin", "RADIXFLEET_MODEL_PATH": str(model), "RADIXFLEET_MODEL_NAME": str(model)}


def test_the_environment_names_the_model_where_no_flag_does(model: Path) -> None:
    environ = {"RADIXFLEET_MODEL_PATH": str(model), "RADIXFLEET_MODEL_NAME": "mine"}
    assert prepare("tokenizer", [], environ) == ([], environ)


def test_a_scheduler_needs_no_model(model: Path) -> None:
    assert prepare("scheduler", ["--page-size", "32"], {}) == (["--page-size", "32"], {})
    assert prepare("scheduler", ["--model-path", str(model)], {})[1]["RADIXFLEET_MODEL_PATH"] == str(model)


def test_without_a_name_it_is_the_small_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import radixfleet.models

    asked: list[Any] = []
    monkeypatch.setattr(radixfleet.models, "resolve", lambda *names: asked.append(names) or model)
    _, env = prepare("detokenizer", ["--revision", "main"], {})
    assert asked == [(None, "main")]
    assert env["RADIXFLEET_MODEL_NAME"] == SMALL_MODEL_NAME


def test_bad_models_and_missing_values_are_said() -> None:
    with pytest.raises(CommandError, match="no such model"):
        prepare("worker", ["--model-path", "/nowhere"], {})
    with pytest.raises(CommandError, match="--model-path needs a value"):
        prepare("worker", ["--model-path"], {})


def radixfleet(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """As a user runs it, from anywhere."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "radixfleet", *words]
    return subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("service", ["tokenizer", "scheduler", "worker", "detokenizer"])
def test_services_start_from_any_folder(service: str, tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()  # a folder of the user's that must not be taken for ours
    (tmp_path / "shared" / "__init__.py").write_text("raise RuntimeError('not yours')")
    outcome = radixfleet(service, "--help", cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    assert "--heartbeat-interval" in outcome.stdout
    outcome = radixfleet(service, "--nonsense", cwd=tmp_path)
    assert outcome.returncode == 2
    assert "--nonsense" in outcome.stderr


async def asked(endpoint: str, answer: Pong | None) -> int:
    """The exit code of one ping at a service that gives this answer."""

    def on_message(identity: bytes, message: Any, frames: list[bytes]) -> None:
        assert isinstance(message, Ping)
        if answer is not None:
            server.send(identity, Pong(message.nonce, answer.healthy, answer.detail))

    server: Server[Any] = Server(endpoint, FromDetokenizer, on_message)
    try:
        process = await asyncio.create_subprocess_exec(sys.executable, "-m", "shared.ping", endpoint, "--timeout", "2")
        return await process.wait()
    finally:
        server.close()


@pytest.mark.parametrize(("answer", "code"), [(Pong(0), 0), (Pong(0, healthy=False, detail="ill"), 1), (None, 1)])
async def test_ping_tells_by_its_exit_code(tmp_path: Path, answer: Pong | None, code: int) -> None:
    assert await asked(f"ipc://{tmp_path}/s", answer) == code


async def test_ping_of_nobody_gives_up(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        await ping.ask(f"ipc://{tmp_path}/nobody", 0.1)
