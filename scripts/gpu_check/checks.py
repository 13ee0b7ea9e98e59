"""Checks of a worker on a device, each against an independent truth or against itself run another way.

    python -m scripts.gpu_check.checks NAME --model DIR [--device cuda|cpu] [--quick]

The last line says what was seen; the exit code is 1 where a check has failed. `scripts/gpu_check.sh` runs them all.

Two ways to compute the same differ in the last bits of bf16, and a greedy choice between two almost equal logits then
differs too. So the rule is: until the first token that differs, log-probabilities are close; the few answers that
differ do so where the two best were close.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from msgspec import structs

from scripts.gpu_check.options import CheckFailed, Options
from scripts.gpu_check.parity import parity
from scripts.gpu_check.player import GREEDY, Answer
from scripts.gpu_check.sampling import sampling
from scripts.gpu_check.shapes import write_shape
from services.gpu_worker.attention.cascade import CascadeCosts
from shared.messages.request import SamplingParams

CLOSE = 0.08  # of a log-probability in bf16, on the average over a run
FAR = 0.6  # of a single one
SAME_SHARE = 0.3  # of the answers are equal to their end, at the least
DRAWN = (
    SamplingParams(temperature=0.9, top_p=0.9, top_k=50, min_p=0.01, seed=11, logprobs=0),
    SamplingParams(temperature=0.8, top_p=0.8, seed=12, logprobs=0),
    SamplingParams(temperature=1.1, seed=13, logprobs=0),
)
"""Each way of drawing; scored, so that it is the host that draws."""


PENALISED = (
    SamplingParams(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.2, logprobs=0),
    SamplingParams(
        temperature=0.8, seed=14, frequency_penalty=0.5, min_new_tokens=999, stop_token_ids=(2,), logprobs=0
    ),
)
"""Counted on the host where scores are wanted, else on the device."""


async def kernels(options: Options) -> str:
    """The device's own attention is there and runs; what it compiles when first used is compiled here."""
    attention = "flashinfer" if options.device == "cuda" and options.attention == "auto" else options.attention
    said = []
    with tempfile.TemporaryDirectory() as folder:
        wide = write_shape(Path(folder), "qwen3-0.6b-shape", quick=True, head_dim=128)
        for model, load_format in ((options.model, "auto"), (str(wide), "dummy")):
            began = time.perf_counter()
            flags = {"attention_backend": attention, "load_format": load_format}
            async with replace(options, model=model).player(**flags) as player:
                await player.generate(options.prompts(3, 40, player.hello.vocab_size), 4)
            said.append(f"{time.perf_counter() - began:.0f} s")
    return f"attention {attention} runs, for the model after {said[0]}, for heads of 128 after {said[1]}"


async def cascade(options: Options) -> str:
    """Rows that share pages: read together, or each for itself. Once all by one prefix, once parts of them by more."""
    rows, pages = options.rows, 8 if options.quick else 32
    third = rows // 3
    inner = [(range(third), 2 * pages), (range(third, 2 * third), 2 * pages)]
    said = []
    # Whether it pays with so small a model is not the question; graphs read row by row.
    free = mock.patch.object(CascadeCosts, "launches", return_value=0)
    async with options.player("bfloat16", disable_cuda_graph=True) as player:
        size, vocab = player.hello.page_size, player.hello.vocab_size
        for name, shares in (("one prefix", [(range(rows), pages)]), ("nested", [(range(rows), pages), *inner])):
            prompts = options.prompts(rows, 40, vocab, shares=[(members, count * size) for members, count in shares])
            runs, read = [], []
            for groups in (False, True):
                before = (await player.gauges())["kv_bytes_read"]
                with free:
                    runs.append(await player.generate(prompts, options.count, shares=shares, groups=groups))
                read.append((await player.gauges())["kv_bytes_read"] - before)
            if not read[1] < 0.9 * read[0]:
                raise CheckFailed(f"{name}: {read[1]:.3g} bytes of K and V read with groups, {read[0]:.3g} without")
            said.append(f"{name}: {close(runs[0], runs[1])}; K and V read: {read[1] / read[0]:.2f} of separate rows")
    return "; ".join(said)


async def graphs(options: Options) -> str:
    """Decode steps from captured graphs against the same steps launched one kernel after the other."""
    sizes = (1, 3, 6) if options.quick else (1, 3, 8, 17, 24)
    answers: list[list[Answer]] = []
    shares = []
    for eager in (False, True):
        async with options.player(disable_cuda_graph=eager) as player:
            run: list[Answer] = []
            for number in sizes:
                prompts = options.prompts(number, 60, player.hello.vocab_size)
                run += await player.generate(prompts, options.count)
            gauges = await player.decode_gauges(options.prompts(3, 9, player.hello.vocab_size))
            shares.append(bool(gauges.get("is_cuda_graph")))
            answers.append(run)
    if shares != [options.device == "cuda", False]:
        raise CheckFailed(f"graphs ran: {shares[0]}; with --disable-cuda-graph: {shares[1]}")
    return close(answers[0], answers[1]) + ("" if shares[0] else "; a CPU has no graphs")


async def run_ahead(options: Options) -> str:
    """One step at a time, sampled on the host, against two in flight, sampled on the device: the same rows in the same
    steps, so the same bits. Then rows that end while their next step is in flight.
    """
    async with options.player() as player:
        prompts = options.prompts(options.rows, 60, player.hello.vocab_size)
        runs: list[list[Answer]] = []
        for params in (GREEDY, *DRAWN, *PENALISED):  # scores are the host's: without them nothing comes back but tokens
            runs.append(await player.generate(prompts, options.count, depth=1, params=params))
            plain = structs.replace(params, logprobs=-1)
            same(runs[-1], await player.generate(prompts, options.count, depth=2, params=plain))
        greedy = runs[0]
        stop = greedy[0].tokens[options.count // 2]
        ending = SamplingParams(temperature=0.0, stop_token_ids=(stop,))
        ended = await player.generate(prompts, options.count, depth=2, params=ending)
    for whole, part in zip(greedy, ended, strict=True):
        # Rows leave the batch when they end, so that sums of the others may differ in their last bits.
        if part.tokens[:1] != whole.tokens[:1] or stop in part.tokens[:-1]:
            raise CheckFailed(f"with the stop token {stop}: {part.tokens}, without: {whole.tokens}")
        if len(part.tokens) != options.count and part.tokens[-1] != stop:
            raise CheckFailed(f"ended without its stop token {stop}: {part.tokens}")
    early = sum(len(answer.tokens) < options.count for answer in ended)
    return f"{len(runs) * len(prompts)} greedy, drawn and penalised answers are equal, {early} ended in flight"


async def resume(options: Options) -> str:
    """Seats taken away in the middle and computed anew elsewhere: exact in fp32, close in bf16."""
    said = []
    for dtype in dict.fromkeys(("float32", options.dtype)):
        async with options.player(dtype) as player:
            prompts = options.prompts(options.rows, 60, player.hello.vocab_size)
            half = options.count // 2
            for params in (GREEDY, DRAWN[0]):
                whole = await player.generate(prompts, options.count, params=params)
                parts = await player.generate(prompts, options.count, interrupt_after=half, params=params)
                if dtype == "float32" or params is GREEDY:
                    said.append(f"{dtype}: {close(whole, parts, exact=dtype == 'float32')}")
    return "; ".join(said)


async def masks(options: Options) -> str:
    """Only allowed tokens are sampled, and a mask that allows everything changes nothing."""
    async with options.player() as player:
        vocab = player.hello.vocab_size
        prompts = options.prompts(options.rows, 60, vocab)

        def allowed(row: int, step: int) -> np.ndarray:
            rng = np.random.default_rng(1000 * row + step)
            return rng.random(vocab) < 0.05

        plain = await player.generate(prompts, options.count)
        full = await player.generate(prompts, options.count, mask=lambda row, step: np.ones(vocab, np.bool_))
        drawn = SamplingParams(temperature=1.0, seed=5)
        for params in (GREEDY, drawn):
            masked = await player.generate(prompts, options.count, mask=allowed, params=params)
            for row, answer in enumerate(masked):
                for step, token in enumerate(answer.tokens):
                    if not allowed(row, step)[token]:
                        raise CheckFailed(f"token {token} of row {row} in step {step} was not allowed")
                if len(answer.tokens) != options.count:
                    raise CheckFailed(f"row {row} has {len(answer.tokens)} tokens")
    return f"{2 * len(plain) * options.count} masked tokens are allowed ones; full masks: {close(plain, full)}"


async def fp8(options: Options) -> str:
    """A cache of 8 bits against one of 16: scores of the same text, computed in chunks so that the cache is read."""
    scores = []
    for kv in ("auto", "fp8_e4m3"):
        async with options.player(kv_cache_dtype=kv) as player:
            (prompt,) = options.prompts(1, 300, player.hello.vocab_size)
            scores.append(np.array(await player.score(prompt, 32)))
            pages = player.hello.kv_bytes_per_page
    difference = np.abs(scores[0] - scores[1])
    if len(difference) < 100 or not np.isfinite(difference).all() or difference.mean() > 0.25:
        raise CheckFailed(
            f"log-probabilities differ by {difference.mean():.3f} on the average, {difference.max():.3f} at most"
        )
    return (
        f"log-probabilities differ by {difference.mean():.4f} on the average, {difference.max():.3f} at most; "
        f"{pages} bytes a page"
    )


def same(one: list[Answer], other: list[Answer]) -> None:
    """Raises CheckFailed where any token differs."""
    different = [row for row, (a, b) in enumerate(zip(one, other, strict=True)) if a.tokens != b.tokens]
    if different:
        row = different[0]
        raise CheckFailed(f"rows {different} differ; row {row}: {one[row].tokens} and {other[row].tokens}")


def close(one: list[Answer], other: list[Answer], *, exact: bool = False) -> str:
    """What is said of answers that are as close as bf16 lets them be. Raises CheckFailed where they are not."""
    equal, differences = 0, []
    for a, b in zip(one, other, strict=True):
        if len(a.tokens) != len(b.tokens):
            raise CheckFailed(f"{len(a.tokens)} tokens and {len(b.tokens)}")
        first = next((i for i, (s, t) in enumerate(zip(a.tokens, b.tokens, strict=True)) if s != t), len(a.tokens))
        equal += first == len(a.tokens)
        # The first token that differs is each time the best one: its score tells how close the two were.
        end = min(first + 1, len(a.logprobs), len(b.logprobs))
        differences += [abs(x - y) for x, y in zip(a.logprobs[:end], b.logprobs[:end], strict=True)]
    mean, most = float(np.mean(differences)), float(np.max(differences))
    seen = f"{equal} of {len(one)} answers are equal, log-probabilities differ by {mean:.4f} ({most:.3f} at most)"
    wrong = equal < len(one) or most > 1e-3 if exact else equal < SAME_SHARE * len(one) or mean > CLOSE or most > FAR
    if wrong:
        raise CheckFailed(seen)
    return seen


CHECKS: dict[str, Callable[[Options], Coroutine[Any, Any, str]]] = {
    "kernels": kernels,
    "parity": parity,
    "cascade": cascade,
    "graphs": graphs,
    "run-ahead": run_ahead,
    "sampling": sampling,
    "resume": resume,
    "masks": masks,
    "fp8": fp8,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=CHECKS)
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    options = Options(given.model, given.device, given.quick, given.attention_backend)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # fp32 is meant where it is said
    try:
        print(asyncio.run(CHECKS[given.check](options)))
    except CheckFailed as error:
        print(f"not as expected: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
