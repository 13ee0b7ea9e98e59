"""Each CPU kernel's share of the measured bandwidth or matrix rate, and its ratio to torch, in one run.

    python benchmarks/kernels.py [--threads N] [--seconds S] [--isa amx|avx512|avx2|portable]

Shapes are those of a 135M model (576 hidden, 9 query and 3 KV heads of 64). Every number is the best of many
repetitions, the kernel and torch taking turns; the memory for a repetition is larger than the caches where weights
or KV would come from memory in a real step.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "3000")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from services.gpu_worker.attention.base import AttentionSpec
from services.gpu_worker.attention.native import NativeAttention
from services.gpu_worker.batch import ForwardBatch, SharedGroup
from services.gpu_worker.kernels import library, rows
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.layers.packed_linear import PackedLinear

HEADS, KV_HEADS, DIM, PAGE, COPIES = 9, 3, 64, 16, 30
Run = Callable[[int], object]  # takes the repetition's number: which copy of the weights or layers to use


@dataclass
class Bench:
    """What everything is compared with, and how long to try."""

    kernels: library.Library
    seconds: float
    bandwidth: float = 0.0  # bytes per second
    rate: float = 0.0  # bf16 operations per second

    def best(self, runs: dict[str, Run], at_a_time: int = COPIES) -> dict[str, float]:
        """Seconds of one call, the best average over `at_a_time` calls, the candidates taking turns."""
        best = dict.fromkeys(runs, math.inf)
        end = time.perf_counter() + self.seconds
        while time.perf_counter() < end:
            for name, run in runs.items():
                start = time.perf_counter()
                for i in range(at_a_time):
                    run(i)
                best[name] = min(best[name], (time.perf_counter() - start) / at_a_time)
        return best

    def line(self, name: str, times: dict[str, float], *, read: float = 0, operations: float = 0) -> None:
        own = times.pop("own")
        shares = f"{read / own / self.bandwidth:6.0%} of bandwidth" if read else " " * 19
        shares += f"  {operations / own / self.rate:6.1%} of rate" if operations else ""
        ratios = "  ".join(f"{other} x{seconds / own:.2f}" for other, seconds in times.items())
        print(f"{name:44} {own * 1e6:9.1f} us {shares}  {ratios}", flush=True)


def limits(bench: Bench) -> None:
    memory = torch.ones(64 << 20, dtype=torch.int64)
    words, threads = memory.numel(), torch.get_num_threads()
    read = bench.kernels.functions.rf_read_memory
    bench.bandwidth = memory.nbytes / bench.best({"own": lambda _: read(memory.data_ptr(), words, threads)}, 1)["own"]
    a = torch.randn(1024, 1024).bfloat16()
    bench.rate = 2 * 1024**3 / bench.best({"own": lambda _: a @ a}, 1)["own"]
    print(f"{threads} threads, {bench.kernels.isa}")
    print(f"{bench.bandwidth / 1e9:.1f} GB/s read, {bench.rate / 1e9:.0f} GFLOP/s bf16 by torch")


def products(bench: Bench, outputs: int, inputs: int) -> None:
    plain = [torch.randn(outputs, inputs).bfloat16() for _ in range(COPIES)]
    packed = [PackedLinear(bench.kernels, weight) for weight in plain]
    for count in (1, 4, 16, 32, 64, 128, 512):
        x, out = torch.randn(count, inputs).bfloat16(), torch.empty(count, outputs, dtype=torch.bfloat16)
        times = bench.best(
            {"own": lambda i, x=x, out=out: packed[i](x, out=out), "torch": lambda i, x=x: F.linear(x, plain[i])}
        )
        size, work = 2 * outputs * inputs, 2 * outputs * inputs * count
        bench.line(f"product {inputs} -> {outputs}, {count} rows", times, read=size, operations=work)


def step(lengths: list[int], new: list[int], shared: int, grouped: bool) -> tuple[ForwardBatch, int]:
    """A batch over scattered pages whose rows share their first `shared` pages, and the number of pages."""
    own = [math.ceil(length / PAGE) - shared for length in lengths]
    num_pages = shared + sum(own)
    order = torch.randperm(num_pages).to(torch.int32)
    tables = torch.zeros(len(lengths), shared + max(own), dtype=torch.int32)
    slots, at = [], shared
    for r, (length, count) in enumerate(zip(lengths, own, strict=True)):
        tables[r, : shared + count] = torch.cat([order[:shared], order[at : at + count]])
        at += count
        slots += [int(tables[r, p // PAGE]) * PAGE + p % PAGE for p in range(length - new[r], length)]
    group = SharedGroup(torch.arange(len(lengths), dtype=torch.int32), shared)
    none = torch.zeros(0, dtype=torch.int64)
    indptr = torch.tensor([0, *torch.tensor(new).cumsum(0).tolist()], dtype=torch.int32)
    kv_lengths = torch.tensor(lengths, dtype=torch.int32)
    groups = (group,) if grouped else ()
    tokens = torch.zeros(len(slots), dtype=torch.int64)
    batch = ForwardBatch(tokens, tokens, indptr, kv_lengths, tables, torch.tensor(slots), none, len(lengths), groups)
    return batch, num_pages


def attention(bench: Bench, name: str, lengths: list[int], new: list[int], shared: int = 0) -> None:
    batch, num_pages = step(lengths, new, shared, grouped=False)
    layers = COPIES if num_pages * COPIES < 40000 else 4
    cache = KVCache(layers, num_pages, PAGE, KV_HEADS, DIM, torch.bfloat16, torch.device("cpu"))
    for layer in cache.layers:
        layer.normal_()
    tokens = int(batch.qo_indptr[-1])
    q, k, v = torch.randn(tokens, HEADS + 2 * KV_HEADS, DIM).bfloat16().split([HEADS, KV_HEADS, KV_HEADS], 1)
    spec, runs = AttentionSpec(DIM**-0.5), {}
    for kind in ("plain", "grouped") if shared else ("plain",):
        torch.manual_seed(0)
        backend = NativeAttention(cache, bench.kernels)
        backend.plan(step(lengths, new, shared, kind == "grouped")[0])
        runs[kind] = lambda i, backend=backend: backend.forward(i % layers, q, k, v, spec)
    if not shared:
        runs["torch"] = lambda i: gathered(cache.layers[i % layers], batch, q)
    times = bench.best(runs, layers)
    times["own"] = times.pop("grouped" if shared else "plain")
    read = 2 * 2 * KV_HEADS * DIM * (sum(lengths) - shared * PAGE * (len(lengths) - 1))
    work = 4 * HEADS * DIM * sum(n * (length - n + (n + 1) / 2) for n, length in zip(new, lengths, strict=True))
    bench.line(name, times, read=read, operations=work)


def gathered(layer: torch.Tensor, batch: ForwardBatch, q: torch.Tensor) -> list[torch.Tensor]:
    """What plain torch does: gather every row's context, then fused attention."""
    out = []
    for r in range(batch.num_rows):
        first, last, length = int(batch.qo_indptr[r]), int(batch.qo_indptr[r + 1]), int(batch.kv_lengths[r])
        pages = layer[batch.page_tables[r, : math.ceil(length / PAGE)]]
        k, v = pages.permute(1, 2, 0, 3, 4).reshape(2, KV_HEADS, -1, DIM)[:, :, :length]
        query, whole = q[first:last].transpose(0, 1)[None], last - first == length
        mask = (
            None if whole or last - first == 1 else torch.ones(last - first, length).tril(length - last + first).bool()
        )
        out.append(F.scaled_dot_product_attention(query, k[None], v[None], mask, is_causal=whole, enable_gqa=True))
    return out


def row_kernels(bench: Bench, count: int) -> None:
    x, weight = torch.randn(count, 576).bfloat16(), torch.ones(576).bfloat16()
    wide, kernels = torch.randn(count, 3072).bfloat16(), bench.kernels

    def torch_norm(_: int) -> torch.Tensor:
        wide_x = x.float()
        return weight * (wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + 1e-5)).bfloat16()

    def torch_gate(_: int) -> torch.Tensor:
        gate, up = wide.chunk(2, -1)
        return F.silu(gate) * up

    times = bench.best({"own": lambda _: rows.rms_norm(kernels, x, weight, 1e-5), "torch": torch_norm})
    bench.line(f"norm, {count} rows", times)
    times = bench.best({"own": lambda _: rows.silu_and_mul(kernels, wide), "torch": torch_gate})
    bench.line(f"silu and mul, {count} rows", times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=1.0, help="per line")
    parser.add_argument("--isa", default="")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    bench = Bench(library.load({library.ISA_VARIABLE: arguments.isa}), arguments.seconds)
    limits(bench)
    for outputs, inputs in ((960, 576), (576, 576), (3072, 576), (576, 1536)):
        products(bench, outputs, inputs)
    attention(bench, "decode, 1 x 4096", [4096], [1])
    attention(bench, "decode, 16 x 256", [256] * 16, [1] * 16)
    attention(bench, "decode, 32 x 1024", [1024] * 32, [1] * 32)
    attention(bench, "prefill, 512", [512], [512])
    attention(bench, "prefill, 512 after 3584", [4096], [512])
    attention(bench, "16 rows sharing 2048 of 2080", [2080] * 16, [1] * 16, shared=128)
    for count in (1, 32, 512):
        row_kernels(bench, count)


if __name__ == "__main__":
    main()
