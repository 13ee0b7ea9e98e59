"""What sampling costs of a step, in each way of choosing a token: our kernels beside torch's passes, in one run.

    python benchmarks/sampling.py [--rows 32] [--steps 60] [--model DIR]

Engines that differ in nothing else take turns, a step each, on real text: one that samples in the kernels and one that
samples as it would without a compiler. A step's time is the forward and everything from logits to tokens, in Python
too. The sums that draws and scores want are found while the logits are made, in the forward's time: a third engine goes
without them, and the last column is what they cost there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from tokenizers import Tokenizer

from benchmarks.quantization import PAGE, WINDOW, build
from radixfleet.models import resolve
from services.gpu_worker.engine import Engine
from services.gpu_worker.kernels import logits as passes
from services.gpu_worker.slots import SlotLimits
from shared.ints import pack
from shared.messages.request import SamplingParams
from shared.messages.step import PrefillRow, SlotOpen, StepCommand

ROOT = Path(__file__).resolve().parents[1]
PROMPT, SAMPLES = 128, 1 << 16
WAYS = {
    "greedy": SamplingParams(temperature=0),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "with top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "with top-k 50": SamplingParams(temperature=0.8, top_k=50),
    "with min-p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "temperature 1, top-p 0.95": SamplingParams(temperature=1, top_p=0.95),
    "greedy, presence penalty": SamplingParams(temperature=0, presence_penalty=0.5),
    "greedy, log-probability": SamplingParams(temperature=0, logprobs=0),
    "greedy, the five likeliest": SamplingParams(temperature=0, logprobs=5),
    "greedy, half of all tokens masked": SamplingParams(temperature=0),
}


@dataclass
class Times:
    """Of one engine's steps, ms."""

    sample: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)

    def share(self) -> float:
        sample, forward = statistics.median(self.sample), statistics.median(self.forward)
        return sample / (sample + forward)


class Bench:
    def __init__(self, folder: Path, rows: int, steps: int) -> None:
        self.rows, self.steps = rows, steps
        self.pages_each = -(-(PROMPT + steps + 1) // PAGE)
        self.runner = build(folder, "none", 3 * rows * self.pages_each).runner
        config = self.runner.config
        self.vocab = config.vocab_size
        self.limits = SlotLimits(rows, 3 * rows * self.pages_each, PAGE, config.max_context, self.vocab)
        text = (ROOT / "DESIGN.md").read_text() + (ROOT / "docs" / "performance.md").read_text()
        self.tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids

    def engine(self, params: SamplingParams, place: int) -> Engine:
        """With all rows prefilled; `place`: of its pages."""
        engine = Engine(self.runner, self.limits, WINDOW, torch.device("cpu"))
        for slot in range(self.rows):
            start = slot * 100 % (len(self.tokens) - PROMPT)
            prompt = pack(self.tokens[start : start + PROMPT])
            first = (place * self.rows + slot) * self.pages_each
            pages = pack(range(first, first + self.pages_each))
            opened = SlotOpen(slot, params, PROMPT, 0, pages, b"", SAMPLES)
            engine.execute(StepCommand(slot, 1, prefills=(PrefillRow(slot, prompt),), opens=(opened,)), _no_masks, 1)
        return engine

    def measure(self, params: SamplingParams, *, masked: bool) -> tuple[Times, Times, Times]:
        """(kernels, torch, kernels for which the product sums nothing)"""
        ways = (contextlib.nullcontext, without_kernels, contextlib.nullcontext)
        engines: list[Engine] = []
        for place, way in enumerate(ways):
            with way():
                engines.append(self.engine(params, place))
        engines[2].slots.sampling.scale[:] = 0
        times = Times(), Times(), Times()
        slots = pack(range(self.rows))
        words = (-(-self.vocab // 32)) * self.rows
        masks = (lambda _: (slots, b"\x55\xaa\x33\xcc" * words)) if masked else _no_masks
        for step in range(self.rows, self.rows + self.steps):
            command = StepCommand(step, 1, decode_slots=slots, masked_slots=slots if masked else b"")
            for engine, way, kept in zip(engines, ways, times, strict=True):
                with way():
                    engine.execute(command, masks, 1)
                kept.sample.append(engine.stats.sample_ms)
                kept.forward.append(engine.stats.forward_ms)
        return times


def _no_masks(step_id: int) -> tuple[bytes, bytes]:
    raise AssertionError(f"step {step_id} has no masks")


@contextlib.contextmanager
def without_kernels() -> Iterator[None]:
    """As where no library could be built; the model's own products stay what they are."""
    with mock.patch.object(passes, "kernels_for", return_value=None):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", default="")
    args = parser.parse_args()
    folder = Path(resolve(args.model or None))
    bench = Bench(folder, args.rows, args.steps)
    print(f"{args.rows} rows of {bench.vocab} logits, {torch.get_num_threads()} threads; ms, medians of {args.steps}")
    print(f"{'':36}{'torch':>8}{'kernels':>9}{'ratio':>8}{'of the step':>13}{'forward':>10}{'sums':>9}")
    for name, params in WAYS.items():
        ours, torchs, bare = bench.measure(params, masked="masked" in name)
        sample, plain = statistics.median(ours.sample), statistics.median(torchs.sample)
        sums = statistics.median(a - b for a, b in zip(ours.forward, bare.forward, strict=True))
        print(
            f"{name:36}{plain:8.2f}{sample:9.2f}{plain / sample:7.1f}x{ours.share():12.1%}"
            f"{statistics.median(ours.forward):10.1f}{sums:9.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
