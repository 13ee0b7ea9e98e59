"""Whether the portable kernels compute on arm64 what they compute here: cross-compiled, and run under qemu.

    python scripts/check_arm64.py [--compiler aarch64-linux-gnu-g++]
        [--run "qemu-aarch64-static -L /usr/aarch64-linux-gnu"]

`arm64_steps.cpp` runs steps and draws of small random models; each of its numbers from there is compared with the one
from here. That those from here are right is what the tests compare with float64. On arm64 itself the tests run as they
are, and this is not needed.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from services.gpu_worker.kernels.build import COMMON_UNITS, FLAGS, SOURCES, find_compiler  # noqa: E402

DRIVER = ROOT / "scripts" / "arm64_steps.cpp"
# Sums in another order; of bf16, whose steps are 1/128, some results are rounded the other way.
TOLERANCE = {"fp32": 2e-4, "bf16": 0.15, "int8": 0.15}
MOST_OTHER_DRAWS = 0.02


def build(compiler: list[str], target: Path) -> Path:
    units = [SOURCES / f"{name}.cpp" for name in (*COMMON_UNITS, "isa_portable")]
    command = [*compiler, *FLAGS, "-fopenmp", f"-I{SOURCES}", *map(str, units), str(DRIVER), "-o", str(target)]
    subprocess.run(command, check=True)
    return target


def printed(command: list[str]) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def compare(there: list[str], here: list[str]) -> int:
    """Prints each model's largest difference; returns how many are too large."""
    if len(there) != len(here):
        raise SystemExit(f"{len(there)} lines there, {len(here)} here")
    failures, model, worst, draws, others, count = 0, "", 0.0, 0, 0, 0

    def finish() -> int:
        if not model:
            return 0
        allowed = TOLERANCE[model.split()[0]]
        is_wrong = not worst <= allowed or others > MOST_OTHER_DRAWS * draws
        drawn = f"{others} of {draws} draws"
        print(f"{model:20}{count:6} logits differ by at most {worst:.1e} of {allowed:.0e}, {drawn}")
        return int(is_wrong)

    for a, b in zip(there, here, strict=True):
        word = b.split()[0]
        if word == "model":
            failures += finish()
            model, worst, draws, others, count = b.removeprefix("model "), 0.0, 0, 0, 0
        elif word == "step":
            if a != b or not b.startswith("step 0"):
                raise SystemExit(f"{model}: {a!r} there, {b!r} here")
        elif word == "draws":
            pairs = list(zip(a.split()[1:], b.split()[1:], strict=True))
            draws, others = draws + len(pairs) - 1, others + sum(x != y for x, y in pairs)
        else:
            difference = abs(float(a) - float(b))
            worst, count = (difference if difference > worst or difference != difference else worst), count + 1
    return failures + finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="aarch64-linux-gnu-g++")
    parser.add_argument("--run", default="qemu-aarch64-static -L /usr/aarch64-linux-gnu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        here = printed([str(build(find_compiler(), Path(folder) / "here"))])
        there = printed([*shlex.split(args.run), str(build(shlex.split(args.compiler), Path(folder) / "there"))])
    if failures := compare(there, here):
        raise SystemExit(f"{failures} models differ")


if __name__ == "__main__":
    main()
