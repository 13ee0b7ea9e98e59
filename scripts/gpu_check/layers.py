"""Products of 8 and 4 bits and experts on a device: against their references, and their time beside bf16.

    python -m scripts.gpu_check.layers [--device cuda|cpu] [--quick] [--moe-backend auto|torch|flashinfer]

One line per size; the exit code is 1 where something is wrong. FlashInfer's experts are compiled when they are asked
for by name, which takes minutes. Leaves whole models to `checks`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

import torch
import torch.nn.functional as F

from services.gpu_worker.kv_cache import FP8_LIMIT, to_fp8
from services.gpu_worker.layers.moe import Experts, SortedExperts
from services.gpu_worker.layers.moe_fused import MoeBackend, experts_maker
from services.gpu_worker.layers.quantized import (
    TRIAL_DISTANCE,
    CannotQuantize,
    QuantizedForm,
    Quantizer,
    rounded,
)

REPEATS = 20
EXPERTS_DISTANCE = 0.05  # bf16 in another order of sums
Line = tuple[bool, str]


def main(arguments: list[str] | None = None) -> int:
    """0 where all is well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--moe-backend", default="auto", choices=get_args(MoeBackend))
    options = parser.parse_args(arguments)
    device, wrong, count = torch.device(options.device), 0, 0
    with torch.inference_mode():
        for right, text in (
            *saturation(device),
            *products(device, quick=options.quick),
            *experts(device, options.moe_backend, quick=options.quick),
        ):
            print("ok   " if right else "WRONG", text, flush=True)
            count, wrong = count + 1, wrong + (not right)
    print(f"quantised products and experts: {count} lines, {wrong} wrong")
    return 1 if wrong else 0


def saturation(device: torch.device) -> Iterator[Line]:
    """What is too large for 8 bits is stored as the largest number."""
    stored = to_fp8(torch.tensor([1.0, 1e6, -1e6], device=device), 1.0).float().tolist()
    yield stored == [1.0, FP8_LIMIT, -FP8_LIMIT], f"8 bits of 1, 1e6, -1e6: {stored}"


def products(device: torch.device, *, quick: bool) -> Iterator[Line]:
    """Quantised products of a Llama-3-8B's layer against the rounded weights in fp32."""
    sizes = [(64, 128)] if quick else [(6144, 4096), (28672, 4096), (4096, 14336)]
    for form in get_args(QuantizedForm):
        try:
            quantizer = Quantizer(form, device, torch.bfloat16)
        except CannotQuantize as error:
            yield True, f"{form}: {error}"
            continue
        for outputs, inputs in sizes:
            weight = _random((outputs, inputs), device, 0.02)
            try:
                product = quantizer(weight, None)
            except (CannotQuantize, RuntimeError) as error:
                yield False, f"{form} {outputs} x {inputs}: {error}"
                continue
            for rows in (1, 17) if quick else (1, 16, 128, 2048):
                yield _product(form, product, weight, _random((rows, inputs), device))


def _product(
    form: QuantizedForm, product: Callable[[torch.Tensor], torch.Tensor], weight: torch.Tensor, x: torch.Tensor
) -> Line:
    distance = _distance(product(x), F.linear(x.float(), rounded(form, weight)))
    ours, plain = _milliseconds(lambda: product(x)), _milliseconds(lambda: F.linear(x, weight))
    text = f"{form} {weight.shape[0]} x {weight.shape[1]}, {x.shape[0]} rows: distance {distance:.4f}, "
    return distance < TRIAL_DISTANCE[form], text + f"{ours:.3f} ms, bf16 {plain:.3f} ms"


def experts(device: torch.device, backend: MoeBackend, *, quick: bool) -> Iterator[Line]:
    """A layer of Qwen3-30B-A3B's shape against the reference."""
    count, columns, hidden, k = (4, 32, 64, 2) if quick else (128, 768, 2048, 8)
    gate_up = _random((count, 2 * columns, hidden), device, 0.02)
    down = _random((count, hidden, columns), device, 0.02)
    reference = SortedExperts(gate_up.clone(), down, "silu")
    try:
        make = experts_maker(backend, device, torch.bfloat16, k)
    except ValueError as error:
        yield False, f"experts: {error}"
        return
    run: Experts | None = None if make is None else make(gate_up, down, "silu")
    if run is None:
        yield device.type == "cpu", "experts: the reference"
        run = reference
    for rows in (1, 9) if quick else (1, 32, 256, 4096):
        x = _random((rows, hidden), device)
        weights, choice = torch.rand((rows, count), device=device).topk(k)
        given = x, choice.int(), weights
        distance = _distance(run(*given), reference(*given).float())
        took = _milliseconds(partial(run, *given))
        text = f"experts {type(run).__name__}, {rows} rows: distance {distance:.4f}, {took:.3f} ms"
        yield distance < EXPERTS_DISTANCE, text


def _random(shape: tuple[int, ...], device: torch.device, deviation: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=device) * deviation).to(torch.bfloat16)


def _distance(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected).norm() / expected.norm())


def _milliseconds(work: Callable[[], object]) -> float:
    """Of one call, the first left out."""
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(REPEATS):
        work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / REPEATS * 1e3


if __name__ == "__main__":
    sys.exit(main())
