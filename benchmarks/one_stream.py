"""What a step of one stream takes, beside its matrix products alone, taking turns in one run.

    python benchmarks/one_stream.py [--contexts 32 128 512] [--rounds 20] [--model DIR] [--probe SOURCE.cpp]

A step is everything from the command to its result, on real text. The products are those of all layers and of the
vocabulary over other random weights, each in a call of its own. `--probe`: a C++ program that does the same its own way
and prints "1 rows: N ms", compiled here for this processor; it runs between the rounds.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import sampling
from benchmarks.sampling import Bench
from radixfleet.models import resolve
from services.gpu_worker.kernels import library
from services.gpu_worker.layers.packed_linear import PackedLinear
from services.gpu_worker.models.config import read_folder
from services.gpu_worker.models.families import DecoderConfig, read_decoder_config
from shared.ints import pack
from shared.messages.request import SamplingParams
from shared.messages.step import StepCommand

STEPS, FIRST = 12, 2  # of a round; what is not counted, while caches and threads settle


class Steps:
    """A stream that decodes from `context` tokens on, again and again."""

    def __init__(self, folder: Path, context: int) -> None:
        sampling.PROMPT = context
        self._engine = Bench(folder, 1, STEPS + 1).engine(SamplingParams(temperature=0), 0)
        self._context, self._next = context, 1

    def run(self) -> None:
        command = StepCommand(self._next, 1, decode_slots=pack(range(1)))
        self._engine.execute(command, sampling._no_masks, 1)
        self._next += 1

    def rewind(self) -> None:
        self._engine.slots.computed[0] = self._context
        self._engine.slots.remaining[0] = sampling.SAMPLES
        self._engine.slots.ended[0] = False


class Products:
    """One row through every product of a model of these sizes, over weights of their own."""

    def __init__(self, config: DecoderConfig) -> None:
        self._kernels = library.load()
        heads = (config.num_heads + 2 * config.kv_heads) * config.head_dim
        layer = [
            (heads, config.hidden, False),
            (config.hidden, config.num_heads * config.head_dim, False),
            (2 * config.intermediate, config.hidden, True),
            (config.hidden, config.intermediate, False),
        ]
        shapes = layer * config.num_layers + [(config.vocab_size, config.hidden, False)]
        self._linears = [
            PackedLinear(self._kernels, torch.randn(outputs, inputs).bfloat16(), gated=gated)
            for outputs, inputs, gated in shapes
        ]
        self._memory = [
            (torch.randn(1, linear.inputs).bfloat16(), torch.empty(1, linear.outputs).bfloat16())
            for linear in self._linears
        ]
        self._calls = [linear.prepared(x, out) for linear, (x, out) in zip(self._linears, self._memory, strict=True)]

    def run(self) -> None:
        for call in self._calls:
            self._kernels.functions.rf_linear(self._kernels.isa_id, call)


def round_of(run: Callable[[], None]) -> float:
    """Milliseconds, the median of a round."""
    taken = []
    for _ in range(STEPS):
        start = time.perf_counter()
        run()
        taken.append((time.perf_counter() - start) * 1e3)
    return statistics.median(taken[FIRST:])


def compiled(source: str, folder: str) -> Path:
    probe = Path(folder) / "probe"
    subprocess.run(["g++", "-O3", "-fopenmp", "-march=native", source, "-o", str(probe)], check=True)
    return probe


def probed(probe: Path) -> float:
    environ = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    printed = subprocess.run([probe], env=environ, capture_output=True, text=True, check=True).stdout
    found = re.search(r"^ *1 rows: ([0-9.]+) ms", printed, re.MULTILINE)
    if found is None:
        raise SystemExit(f"the probe printed no time of one row: {printed!r}")
    return float(found.group(1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--model", default="")
    parser.add_argument("--probe", default="")
    args = parser.parse_args()
    folder = Path(resolve(args.model or None))
    steps = {f"step at {context} tokens": Steps(folder, context) for context in args.contexts}
    read = read_folder(str(folder))
    products = Products(read_decoder_config(read.architecture, read.config))
    times: dict[str, list[float]] = {name: [] for name in (*steps, "products alone")}
    with tempfile.TemporaryDirectory() as scratch:
        probe = compiled(args.probe, scratch) if args.probe else None
        for _ in range(args.rounds):
            times["products alone"].append(round_of(products.run))
            for name, stream in steps.items():
                stream.rewind()
                times[name].append(round_of(stream.run))
            if probe is not None:
                times.setdefault("probe", []).append(probed(probe))
    report(times)


def report(times: dict[str, list[float]]) -> None:
    beside = [name for name in ("products alone", "probe") if name in times]
    print(f"{'ms, medians of ' + str(len(next(iter(times.values())))) + ' rounds':24}{'':8}{'best':>8}", end="")
    print("".join(f"{'of ' + name:>20}" for name in beside))
    for name, taken in times.items():
        print(f"{name:24}{statistics.median(taken):8.2f}{min(taken):8.2f}", end="")
        for other in beside:
            ratios = [mine / theirs for mine, theirs in zip(taken, times[other], strict=True)]
            print(f"{statistics.median(ratios):19.2f}x", end="")
        print(flush=True)


if __name__ == "__main__":
    main()
