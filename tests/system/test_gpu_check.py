"""The check of a GPU, run on a CPU with a tiny model: the script itself works, whatever the card would say."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.gpu_check.shapes import write_tiny

ROOT = Path(__file__).resolve().parents[2]
CHECKS = ("kernels", "parity", "cascade", "graphs", "run-ahead", "sampling", "resume", "masks", "fp8")
STEPS = ("versions", "model", *CHECKS, "layers", "benchmark")

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    # A GPU of this machine is left alone; one thread, for what is computed here is tiny; steps in two halves as there.
    settings = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "RADIXFLEET_PIPELINED_ON_CPU": "1"}
    environment = {**os.environ, "PYTHON": sys.executable, **settings}
    command = [str(ROOT / "scripts/gpu_check.sh"), *flags]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def test_every_step_passes_on_a_cpu(model_dir: Path, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", vocab_size=49152)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_dir / name, folder / name)
    done = run("--device", "cpu", "--quick", "--model", str(folder), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("PASS", "FAIL"))]
    assert [(line[0], line[1]) for line in lines] == [("PASS", name) for name in STEPS]
    found = json.loads((tmp_path / "out" / "gpu.json").read_text())
    assert found["device"]["bandwidth"] > 0
    assert {line["model"] for line in found["models"]} == {"llama-3-8b-shape", "qwen3-0.6b-shape", "small model"}
    assert all(line["tokens_per_s"] > 0 and line["share"] > 0 for line in found["models"])
    talks = found["conversations"]
    assert talks["without"]["hit_rate"] == 0
    assert talks["with"]["hit_rate"] > 0.3


def test_a_step_that_fails_is_said_and_counted(tmp_path: Path) -> None:
    """There is no device to check."""
    (tmp_path / "config.json").write_text("{}")
    done = run("--device", "cuda", "--quick", "--model", str(tmp_path), "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "FAIL  versions" in done.stdout
    assert "torch finds no CUDA device" in done.stdout
    assert "PASS" not in done.stdout
