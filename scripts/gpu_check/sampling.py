"""The choice made on the device against the host sampler's, for the same logits on the same device."""

from __future__ import annotations

import time

import numpy as np
import torch

from scripts.gpu_check.options import CheckFailed, Options
from services.gpu_worker.cuda.device import CudaDevice, HostDevice
from services.gpu_worker.cuda.sampler import DeviceSampler
from services.gpu_worker.cuda.staging import Staging
from services.gpu_worker.sampler import Sampler
from services.gpu_worker.sampling_columns import SampleRows, SamplingColumns
from shared.messages.request import SamplingParams

PARAMETERS = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.95},
    {"temperature": 1.3, "top_p": 0.5, "min_p": 0.01},
    {"temperature": 1.0, "min_p": 0.05},
]


async def sampling(options: Options) -> str:
    """Rows of all kinds together: flat, peaked, with ties, and some that are not fit."""
    device = torch.device(options.device)
    vocab, rows, rounds = (3000, 28, 2) if options.quick else (151_936, 112, 8)
    ours = DeviceSampler(Staging(CudaDevice(device) if device.type == "cuda" else HostDevice()))
    theirs = Sampler(vocab, device)
    spent, generator = 0.0, torch.Generator(device=device).manual_seed(1)
    for number in range(rounds):
        logits = torch.randn((rows, vocab), generator=generator, device=device) * (number % 4 + 0.1)
        if number % 3 == 2:
            logits.round_()
        logits[5], logits[9, 3] = float("-inf"), float("nan")
        chosen = _parameters(rows, vocab, number)
        expected, fit = theirs.sample(logits.clone(), chosen)
        began = time.perf_counter()
        tokens, ours_fit = ours.sample(logits, chosen)
        spent += time.perf_counter() - began
        if not (np.array_equal(tokens, expected) and np.array_equal(fit, ours_fit)):
            wrong = np.flatnonzero(tokens != expected)
            kinds = sorted({row % len(PARAMETERS) for row in wrong.tolist()})
            raise CheckFailed(f"{len(wrong)} of {rows} tokens differ, of the parameters {kinds}")
    return f"{rounds * rows} tokens over {vocab} are the host sampler's, {spent / rounds * 1e3:.2f} ms for {rows} rows"


def _parameters(rows: int, vocab: int, number: int) -> SampleRows:
    columns = SamplingColumns(rows, vocab)
    for row in range(rows):
        columns.set(row, SamplingParams(seed=row + 1, **PARAMETERS[row % len(PARAMETERS)]))  # type: ignore[arg-type]
    return columns.rows(np.arange(rows), np.arange(rows) + number * 1000)
