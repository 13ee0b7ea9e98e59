"""What `--quantization int8` costs in perplexity and gives in speed, against bf16, in one run.

    python benchmarks/quantization.py [--model PATH] [--threads N] [--tokens 4096] [--steps 64] [--text FILE ...]

Perplexity is that of the repository's own pages, in windows of 512 tokens; a token's loss is taken where its logit is
computed, in the same steps a server would run. For speed both models take turns at whole decode steps, and the best
round of each counts.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from radixfleet.models import resolve
from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.model_runner import ModelRunner, load_model
from services.gpu_worker.models.loading import Quantization

ROOT = Path(__file__).resolve().parents[1]
PAGE, WINDOW, CONTEXT, STREAMS = 16, 512, 256, (1, 8, 32)
TEXTS = ("README.md", "DESIGN.md", "docs/language.md", "docs/api.md", "docs/flags.md")


@dataclass
class Candidate:
    """One way of keeping the weights, ready to run."""

    name: str
    runner: ModelRunner
    megabytes: float


def build(folder: Path, quantization: Quantization, pages: int) -> Candidate:
    before = resident()
    loaded = load_model(
        str(folder),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        load_format="auto",
        model_impl="own",
        attention_backend="native",
        context_length=0,
        deterministic=False,
        quantization=quantization,
    )
    megabytes = (resident() - before) / 2**20
    return Candidate(
        "bf16" if quantization == "none" else quantization, loaded.build_runner(pages, PAGE, WINDOW), megabytes
    )


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def batch(rows: list[tuple[list[int], int]], all_logits: bool) -> ForwardBatch:
    """Rows of (new tokens, tokens before them); row r has the pages from r * CONTEXT_PAGES on."""
    width = max(-(-(start + len(tokens)) // PAGE) for tokens, start in rows)
    tables = torch.arange(len(rows) * width, dtype=torch.int32).view(len(rows), width)
    positions = [p for tokens, start in rows for p in range(start, start + len(tokens))]
    owners = [r for r, (tokens, _) in enumerate(rows) for _ in tokens]
    ends = torch.tensor([len(tokens) for tokens, _ in rows]).cumsum(0)
    return ForwardBatch(
        token_ids=torch.tensor([t for tokens, _ in rows for t in tokens]),
        positions=torch.tensor(positions),
        qo_indptr=F.pad(ends, (1, 0)).int(),
        kv_lengths=torch.tensor([start + len(tokens) for tokens, start in rows], dtype=torch.int32),
        page_tables=tables,
        kv_slots=torch.tensor([r * width * PAGE + p for r, p in zip(owners, positions, strict=True)]),
        logit_rows=torch.arange(len(positions)) if all_logits else ends - 1,
        num_decode_rows=sum(len(tokens) == 1 for tokens, _ in rows),
    )


def perplexity(candidate: Candidate, ids: list[int]) -> float:
    loss, count = 0.0, 0
    for start in range(0, len(ids) - 1, WINDOW - 1):
        window = ids[start : start + WINDOW]
        logits = candidate.runner.forward(batch([(window, 0)], all_logits=True))
        loss += F.cross_entropy(logits[:-1], torch.tensor(window[1:]), reduction="sum").item()
        count += len(window) - 1
    return math.exp(loss / count)


def decode_seconds(candidates: list[Candidate], streams: int, steps: int, rounds: int) -> list[float]:
    """Seconds of one decode step of each candidate: the best round of `steps` steps, sampling left out."""
    tokens = torch.randint(1000, 20000, (CONTEXT + steps,)).tolist()
    best = [math.inf] * len(candidates)
    batches = [batch([([tokens[p]], p)] * streams, all_logits=False) for p in range(CONTEXT, CONTEXT + steps)]
    for _ in range(rounds):
        for index, candidate in enumerate(candidates):
            started = time.perf_counter()
            for step in batches:
                candidate.runner.forward(step)
            best[index] = min(best[index], (time.perf_counter() - started) / steps)
    return best


def report(candidates: list[Candidate], ids: list[int], options: argparse.Namespace) -> None:
    plain, small = candidates
    measured = [perplexity(candidate, ids) for candidate in candidates]
    print(f"{'':28}{plain.name:>12}{small.name:>12}{'ratio':>9}")
    change = 100 * (measured[1] / measured[0] - 1)
    print(f"{f'perplexity, {len(ids)} tokens':28}{measured[0]:12.4f}{measured[1]:12.4f}{change:+8.2f}%")
    ratio = plain.megabytes / max(small.megabytes, 1)
    print(f"{'memory of weights, MiB':28}{plain.megabytes:12.0f}{small.megabytes:12.0f}{ratio:8.2f}x")
    for streams in STREAMS:
        a, b = decode_seconds(candidates, streams, options.steps, options.rounds)
        print(f"{f'{streams} streams, tokens/s':28}{streams / a:12.1f}{streams / b:12.1f}{a / b:8.2f}x", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--text", nargs="*", default=[str(ROOT / name) for name in TEXTS])
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    folder = Path(resolve(options.model or None))
    text = "\n".join(Path(name).read_text(encoding="utf-8") for name in options.text)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids[: options.tokens]
    pages = max(STREAMS) * -(-(CONTEXT + options.steps) // PAGE)
    report([build(folder, "none", pages), build(folder, "int8", pages)], ids, options)


if __name__ == "__main__":
    main()
