"""Building, caching and choosing the kernel library, and its page copy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.gpu_worker.kernels import NativeUnavailable, build, library
from services.gpu_worker.kernels.pages import PageCopier

LIBRARY = library.load()


def fake_compiler(folder: Path, body: str) -> str:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_a_second_load_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_build", lambda *_: pytest.fail("compiled again"))
    assert build.library_path().is_file()


def test_no_compiler_is_unavailable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NativeUnavailable, match="no C"):
        library.load()


def test_a_broken_compiler_says_what_it_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, "echo out of cheese >&2; exit 1"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NativeUnavailable, match="out of cheese"):
        library.load()
    assert not list(tmp_path.glob("radixfleet/kernels/*.so"))


def test_a_compiler_without_wide_units_builds_the_portable_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = build.find_compiler()[0]
    monkeypatch.setenv("CXX", fake_compiler(tmp_path, f'case "$*" in *-mavx2*) exit 1;; esac\nexec {real} -O0 "$@"'))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loaded = library.load({})
    assert library.available_isas(loaded.functions) == ("portable",)


def test_concurrent_builds_leave_one_library(tmp_path: Path) -> None:
    real = build.find_compiler()[0]
    compiler = fake_compiler(tmp_path, f'case "$*" in *-mavx2*) exit 1;; esac\nexec {real} "$@" -O0')
    environ = {**os.environ, "CXX": compiler, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "services.gpu_worker.kernels.build"]
    running = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE) for _ in range(2)]
    printed = {process.communicate()[0] for process in running}
    assert [process.returncode for process in running] == [0, 0]
    assert len(printed) == 1
    assert [str(path) for path in (tmp_path / "radixfleet/kernels").iterdir()] == [printed.pop().decode().strip()]


def test_every_unit_of_this_processor_is_built() -> None:
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    isas = library.available_isas(LIBRARY.functions)
    assert isas[0] == "portable"
    assert ("avx2" in isas) == (" avx2 " in flags and " fma " in flags)
    assert ("avx512" in isas) == (" avx512_bf16 " in flags)


def test_the_variable_forces_a_path() -> None:
    assert library.load({}).isa == library.available_isas(LIBRARY.functions)[-1]
    assert library.load({"RADIXFLEET_CPU_ISA": "portable"}).isa == "portable"
    with pytest.raises(ValueError, match="avx9000"):
        library.load({"RADIXFLEET_CPU_ISA": "avx9000"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_page_copies_read_before_they_write(dtype: torch.dtype) -> None:
    layers = [torch.randn(6, 2, 3, 5, 7).to(dtype) for _ in range(3)]
    before = [layer.clone() for layer in layers]
    copier = PageCopier(LIBRARY, layers)
    pairs = [([0, 1, 2, 2], [1, 2, 0, 5]), ([3, 3, 4], [0, 5, 2]), ([4], [4])]  # a cycle and a fork; apart; itself
    for sources, targets in pairs:
        copier(torch.tensor(sources), torch.tensor(targets))
        for layer, old in zip(layers, before, strict=True):
            assert torch.equal(layer[targets], old[sources])
            rest = [page for page in range(6) if page not in targets]
            assert torch.equal(layer[rest], old[rest])
            old.copy_(layer)
    copier(torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    with pytest.raises(ValueError, match="not in the cache"):
        copier(torch.tensor([0]), torch.tensor([6]))


def test_compilers_know_the_processor_features_they_are_asked_for() -> None:
    """Of all names only these are known to each g++ and clang++ in use; an unknown one leaves no kernels at all."""
    known = {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"}
    asked = re.findall(r'__builtin_cpu_supports\("(\w+)"\)', (build.SOURCES / "dispatch.cpp").read_text())
    assert asked
    assert set(asked) <= known
