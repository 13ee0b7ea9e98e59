"""Phases of `make check-deploy`: what outlasts one is ended with its children, and a failure says what was tried."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from scripts.deploy_phases import CheckFailed, Phases, end_running, phases, run, until

FOREVER = "sleep 600 & echo $! > {pid}; wait"


def gone(pid: Path) -> bool:
    number = int(pid.read_text())
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_command_ends_with_its_phase_and_so_do_its_children(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    with pytest.raises(CheckFailed, match="the time of its phase"), phases("short", 3):
        run("sh", "-c", FOREVER.format(pid=pid))
    with phases("after", 60):
        until("the child is gone", lambda: gone(pid))


def test_waiting_ends_with_the_phase_and_says_for_what() -> None:
    with pytest.raises(CheckFailed, match=r"'short' took longer .* a miracle"), phases("short", 0.1):
        until("a miracle", lambda: False)


def test_a_failure_shows_what_the_command_said() -> None:
    with phases("any", 60), pytest.raises(CheckFailed, match=r"(?s)sh -c.*so it goes"):
        run("sh", "-c", "echo so it goes >&2; exit 3")
    assert run("sh", "-c", "echo text; exit 3", check=False) == "text"


def test_what_a_thread_runs_can_be_ended(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    outcome: list[str] = []
    with phases("long", 60):
        command = ("sh", "-c", FOREVER.format(pid=pid))
        thread = threading.Thread(target=lambda: outcome.append(run(*command, check=False)))
        thread.start()
        until("it runs", lambda: pid.exists() and pid.read_text().endswith("\n"))
        end_running()
        thread.join()
        until("the child is gone", lambda: gone(pid))


def test_the_table_has_every_phase() -> None:
    measured = Phases()
    for name in ("one", "two"):
        with measured(name, 5):
            pass
    assert [line.split()[0] for line in measured.table().splitlines()] == ["phase", "one", "two", "all"]
