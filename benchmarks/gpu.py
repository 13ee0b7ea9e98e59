"""What a worker reaches of its device: decode and prefill as shares of the measured memory bandwidth and matrix rate.

    python benchmarks/gpu.py --model DIR [--device cuda|cpu] [--quick] [--write results.json]

First the device alone, in plain torch: bandwidth of a large copy, rate of a large product. Then, per model, one worker:
decode steps of 1, 32 and 256 rows of 512 tokens each, and prompts of several lengths, over the worker's own socket with
two steps in flight. Two models have the shapes of Llama-3-8B and Qwen3-0.6B and random weights; DIR is the third. Last
conversations of ten rounds through the whole server, with the radix cache and without it (benchmarks/shared_prefix.py).

share of bandwidth    bytes that a decode step must read (weights once, K and V of all rows) per second
share of matrix rate  operations of a prompt's products (attention's are not counted) per second
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks import shared_prefix
from scripts.gpu_check.player import Player
from scripts.gpu_check.shapes import (
    SHAPES,
    kv_bytes_per_token,
    layer_parameters,
    operations_per_token,
    write_shape,
)

ITEM_BYTES = 2  # everything is bf16
CONTEXT = 512


@dataclass(frozen=True, slots=True)
class Device:
    """What the device does in plain torch."""

    name: str
    bandwidth: float  # bytes/s, read and written by a copy
    rate: float  # operations/s of a bf16 product


@dataclass(frozen=True, slots=True)
class Line:
    """One measurement of one model."""

    model: str
    what: str
    tokens_per_s: float
    share: float
    of: str


def measure_device(device: torch.device, *, quick: bool) -> Device:
    """The best of several repetitions each."""
    large, side = (1 << 24, 512) if quick else (1 << 30, 8192)
    source = torch.ones(large, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    copy = _best(lambda: target.copy_(source), device)
    a = torch.randn(side, side, device=device).to(torch.bfloat16)
    product = torch.empty_like(a)
    multiply = _best(lambda: torch.mm(a, a, out=product), device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return Device(name, 2 * source.nbytes / copy, 2.0 * side**3 / multiply)


def _best(run: Callable[[], object], device: torch.device, repeat: int = 12) -> float:
    best = float("inf")
    for _ in range(repeat):
        _synchronize(device)
        started = time.perf_counter()
        run()
        _synchronize(device)
        best = min(best, time.perf_counter() - started)
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


async def measure_model(name: str, folder: Path, device: Device, options: argparse.Namespace) -> list[Line]:
    """One worker with this model, in bf16."""
    config = json.loads((folder / "config.json").read_text())
    rows = (1, 4) if options.quick else (1, 32, 256)
    prompts = (64, 128) if options.quick else (512, 2048, 4096)
    context, steps = (32, 4) if options.quick else (CONTEXT, 48)
    longest = min(max(*prompts, context + steps) + 16, config["max_position_embeddings"])
    flags: dict[str, Any] = {
        "dtype": "bfloat16",
        "load_format": "auto" if list(folder.glob("*.safetensors")) else "dummy",
        "max_running_requests": max(rows),
        "max_batched_tokens": max(prompts),
        "max_total_tokens": max(max(rows) * (context + steps + 32), longest + 32),
        "context_length": longest,
        "attention_backend": options.attention_backend,
        "threads": 1 if options.quick else 0,
    }
    lines = []
    async with Player(str(folder), options.device, **flags) as player:
        head = config["hidden_size"] * config["vocab_size"]
        weights = ITEM_BYTES * (layer_parameters(config) + head)
        for number in rows:
            seconds = await player.decode_seconds(number, context, steps)
            read = weights + number * kv_bytes_per_token(config, ITEM_BYTES) * (context + steps / 2)
            share = read / seconds / device.bandwidth
            lines.append(Line(name, f"decode, {number} rows of {context}", number / seconds, share, "bandwidth"))
        for length in (length for length in prompts if length < longest):
            seconds = await player.prefill_seconds(length, 3)
            operations = length * operations_per_token(config)
            rate = length / seconds
            lines.append(Line(name, f"prompt of {length}", rate, operations / seconds / device.rate, "matrix rate"))
    return lines


def conversations(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Ten rounds of 50 + 50 tokens, the history sent again each round."""
    rounds = argparse.Namespace(
        conversations=1 if options.quick else 8,
        rounds=3 if options.quick else 10,
        output_tokens=8 if options.quick else 50,
        dtype="bfloat16",
        model=options.model,
    )
    more = ["--device", options.device, "--skip-server-warmup"]
    if options.quick:
        more += ["--max-total-tokens", "8192", "--threads", "1"]
    runs = {
        "without": shared_prefix.measure(rounds, "--disable-radix-cache", *more),
        "with": shared_prefix.measure(rounds, *more),
    }
    return {
        name: {
            "alone_s": run.conversation_s[0],
            "all_s": run.wall_s,
            "hit_rate": run.cached_tokens / run.prompt_tokens,
            "computed_per_request": run.computed_per_request,
            "median_ttft_ms": 1e3 * sorted(run.ttft)[len(run.ttft) // 2],
        }
        for name, run in runs.items()
    }


def report(device: Device, lines: list[Line], talks: dict[str, dict[str, float]]) -> None:
    print(f"{device.name}: copies at {device.bandwidth / 1e9:.0f} GB/s, products at {device.rate / 1e12:.1f} Tflop/s")
    print(f"{'model':20}{'what':28}{'tokens/s':>12}{'share':>8}  of the measured")
    for line in lines:
        print(f"{line.model:20}{line.what:28}{line.tokens_per_s:12.0f}{100 * line.share:7.1f}%  {line.of}")
    if not talks:
        return
    print(f"{'conversations':36}{'no cache':>12}{'radix cache':>14}{'ratio':>8}")
    for key in talks["with"]:
        a, b = talks["without"][key], talks["with"][key]
        print(f"{key.replace('_', ' '):36}{a:12.2f}{b:14.2f}{f'{a / b:7.2f}x' if a and b else '':>8}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="folder of a small model with weights and tokenizer")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few steps: whether it works")
    parser.add_argument("--write", default="", help="JSON file for the results")
    options = parser.parse_args()
    device = measure_device(torch.device(options.device), quick=options.quick)
    lines: list[Line] = []
    with tempfile.TemporaryDirectory(prefix="radixfleet-shapes-") as folder:
        models = {name: write_shape(Path(folder), name, quick=options.quick) for name in SHAPES}
        if options.model:
            models["small model"] = Path(options.model)
        for name, path in models.items():
            lines += asyncio.run(measure_model(name, path, device, options))
            if options.device == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
    has_tokenizer = bool(options.model) and (Path(options.model) / "tokenizer.json").exists()
    talks = conversations(options) if has_tokenizer else {}
    report(device, lines, talks)
    if not has_tokenizer:
        print("no conversations: the model has no tokenizer")
    if options.write:
        found = {"torch": torch.__version__, "device": asdict(device), "models": [asdict(line) for line in lines]}
        Path(options.write).write_text(json.dumps({**found, "conversations": talks}, indent=2) + "\n")


if __name__ == "__main__":
    main()
