"""Runs the kernel tests over kernels built with the address and undefined-behaviour sanitizers.

    python scripts/sanitize_kernels.py [--all | pytest arguments]

Of every test one case per instruction set and dtype, which takes less than a minute once the kernels are built (as
long again the first time); with --all every case. Tiles are plain code here, so that what they read and write is seen,
on processors without them too. The sanitizer's runtime is preloaded into Python, so that every
tensor the tests make has guarded borders.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from services.gpu_worker.kernels.build import find_compiler  # noqa: E402
from services.gpu_worker.kernels.library import FLAGS_VARIABLE  # noqa: E402

SOFT_TILES = "-DRF_SOFT_TILES"
FLAGS = f"{SOFT_TILES} -O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
TESTS = [f"tests/gpu_worker/{name}.py" for name in ("test_native_attention", "test_native_groups")]
TESTS += [f"tests/gpu_worker/test_kernels_{name}.py" for name in ("linear", "int8", "rows", "logits", "decoder")]
TESTS.append("tests/gpu_worker/test_sampler.py")
# Tests of every kernel on every path.
CHOICE = "random_batches or odd_shapes or several_blocks or straddle or sliding_window or page_sizes-fp32 or two_groups"
CHOICE += " or test_masks or test_blocks or test_edits or test_scores or test_peaks or survivors"
CHOICE += " or int8_odd or int8_row_counts or int8_with_norm"
CHOICE += " or gate or of_a_sum or rotate or only_wanted"
CHOICE += " or more_than_once or same_call or chunks_rows_or_threads or many_rows"
KINDS = {"portable", "avx2", "avx512", "amx", "fp32", "bf16"}


def main() -> int:
    compiler = find_compiler()
    runtime = [_runtime(compiler, name) for name in ("libasan.so", "libubsan.so")]
    environ = {
        **os.environ,
        FLAGS_VARIABLE: FLAGS,
        "LD_PRELOAD": " ".join(runtime),
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",  # leaks are Python's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "2",
    }
    words = sys.argv[1:]
    chosen = ["-k", CHOICE, *TESTS] if words == ["--all"] else words or one_case_each()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--capture=sys", "-p", "no:cacheprovider", *chosen]
    return subprocess.run(command, env=environ, cwd=ROOT, check=False).returncode


def one_case_each() -> list[str]:
    """Ids of the chosen tests, the first case of each function, instruction set and dtype."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", "-k", CHOICE, *TESTS]
    environ = {**os.environ, FLAGS_VARIABLE: SOFT_TILES}
    listed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, env=environ).stdout
    first: dict[tuple[str, ...], str] = {}
    for line in listed.splitlines():
        function, _, case = line.partition("[")
        if "::" in function:
            kinds = [word for word in case.rstrip("]").split("-") if word in KINDS]
            first.setdefault((function, *kinds), line)
    if not first:
        raise SystemExit(f"no kernel tests were found:\n{listed}")
    return list(first.values())


def _runtime(compiler: list[str], name: str) -> str:
    asked = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = asked.stdout.strip()
    if not os.path.isabs(path):
        raise SystemExit(f"the compiler has no {name}")
    return path


if __name__ == "__main__":
    raise SystemExit(main())
