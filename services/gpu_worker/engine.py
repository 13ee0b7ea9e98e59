"""Executes one StepCommand: slots, page copies, one forward, masks, sampling, scores. Leaves the wire to the worker.

Raises out of `execute` are faults of the whole step (`faults.classify`); what concerns one row is a RowError in the
result. Everything here runs in the compute thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.batch_builder import build_batch
from services.gpu_worker.decode_batches import DecodeBatches
from services.gpu_worker.kernels import logits as passes
from services.gpu_worker.kernels.logits import Blocks
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.outcome import Outcome
from services.gpu_worker.rows import StepRows, plan_rows
from services.gpu_worker.sampler import Sampler
from services.gpu_worker.sampling import MaskRows, sample_rows, take_masks
from services.gpu_worker.slots import SlotLimits, Slots
from shared.messages.step import StepCommand, StepResult

Ints = NDArray[np.int64]
MaskSource = Callable[[int], tuple[bytes, bytes]]
"""Waits for the masks of a step: (int32 slots, uint32 words). Raises StepAborted when the wait is given up."""


class Runner(Protocol):
    """What the engine needs of a model."""

    kv_cache: KVCache

    @property
    def kv_bytes_read(self) -> int: ...

    @property
    def blocks(self) -> Blocks | None:
        """What is known of the last forward's logits."""
        ...

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32 logits [len(logit_rows), vocab]; the engine may write into them."""
        ...


@dataclass(slots=True)
class StepStats:
    """What the last step was, for gauges."""

    decode_rows: int = 0  # of a row with guesses each token that counts
    prefill_rows: int = 0
    tokens: int = 0
    forward_ms: float = 0.0
    sample_ms: float = 0.0
    mask_wait_ms: float = 0.0
    kv_bytes_read: int = 0  # since the start
    is_cuda_graph: bool = False


class Engine:
    """One model with its slots; a step is a function of what came before it and of the command."""

    def __init__(self, runner: Runner, limits: SlotLimits, max_batched_tokens: int, device: torch.device) -> None:
        self.runner = runner
        self._device = device
        self.max_batched_tokens = max_batched_tokens
        self.slots = Slots(limits)
        self._kernels = passes.kernels_for(device)
        self._sampler = Sampler(limits.vocab_size, device, self._kernels)
        self._decodes = DecodeBatches(self.slots) if device.type == "cpu" else None
        self.stats = StepStats()

    @property
    def kv_cache(self) -> KVCache:
        """For whoever moves pages that no step touches."""
        return self.runner.kv_cache

    def reset(self) -> None:
        """Forget all requests, as a new incarnation must."""
        self.slots.reset()

    @torch.inference_mode()
    def execute(self, command: StepCommand, masks: MaskSource, incarnation: int, queue_ms: float = 0.0) -> StepResult:
        """Apply the command and answer it. Raises ProtocolError, StepAborted, and whatever the model raises."""
        self.slots.apply(command)
        self._copy_pages(command)
        rows = plan_rows(command, self.slots, self.max_batched_tokens)
        outcome = Outcome(rows.num_outputs)
        for slot, detail in rows.errors.items():
            outcome.fail(self.slots, slot, detail)
        started = time.perf_counter()
        logits = self._forward(rows, command)
        forwarded = time.perf_counter()
        held = take_masks(command, masks, rows, self.slots.limits.vocab_size)
        waited = time.perf_counter()
        if logits is not None:
            self._finish(rows, logits, held, outcome)
        self.stats = StepStats(
            decode_rows=rows.num_decode + sum(outcome.count(d.outputs) for d in rows.drafts),
            prefill_rows=rows.num_computed - rows.num_decode - len(rows.drafts),
            tokens=rows.num_tokens,
            forward_ms=(forwarded - started) * 1e3,
            mask_wait_ms=(waited - forwarded) * 1e3 if command.masked_slots else 0.0,
            sample_ms=(time.perf_counter() - waited) * 1e3,
            kv_bytes_read=self.runner.kv_bytes_read,
        )
        return outcome.result(command, incarnation, self.stats.forward_ms, self.stats.mask_wait_ms, queue_ms)

    def follow(self, command: StepCommand) -> None:
        """As a rank beyond the first: all of a step but sampling, whose outcome rank 0 tells."""
        with torch.inference_mode():
            self.slots.apply(command)
            self._copy_pages(command)
            rows = plan_rows(command, self.slots, self.max_batched_tokens)
            self._forward(rows, command)
            self.slots.computed[rows.slots] += rows.lengths

    def _copy_pages(self, command: StepCommand) -> None:
        pairs = self.slots.copy_pairs(command)
        if pairs is not None:
            sources, targets = (torch.from_numpy(np.ascontiguousarray(p)).to(self._device) for p in pairs)
            self.runner.kv_cache.copy_pages(sources, targets)

    def _forward(self, rows: StepRows, command: StepCommand) -> torch.Tensor | None:
        if not rows.num_rows:
            return None
        if self._decodes is not None and not command.prefills:
            return self.runner.forward(self._decodes.build(rows, command))
        logits = self.runner.forward(build_batch(rows, command, self.slots, self._device, hidden=self.kv_cache.hidden))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the time of a step is its own, and its errors are raised in it
        return logits

    def _finish(self, rows: StepRows, logits: torch.Tensor, masks: MaskRows | None, outcome: Outcome) -> None:
        slots = self.slots
        sampling = len(rows.sampling)
        # What there is nothing of is not even begun: code is slow the first time after a forward.
        if rows.spans:
            outcome.score_prompts(rows.spans, logits[sampling:], slots)
            logits = logits[:sampling]
        if rows.chunks and slots.num_edited:
            extend_histories(rows, slots.computed[rows.slots], slots)
        slots.computed[rows.slots] += rows.lengths
        if sampling:
            blocks = self._blocks(logits, rows)
            sample_rows(rows, logits, masks, slots, self._sampler, outcome, blocks=blocks)

    def _blocks(self, logits: torch.Tensor, rows: StepRows) -> Blocks | None:
        """What is known of logits [S, vocab], for the kernels; found now where the model's product noted nothing."""
        if self._kernels is None:
            return None
        blocks, count = self.runner.blocks, len(rows.sampling)
        if blocks is not None:
            return blocks if blocks.rows == count else blocks.first(count)
        scales = self.slots.sampling.scale[rows.slots[rows.sampling]]
        return Blocks.of(self._kernels, logits, torch.from_numpy(scales))


def extend_histories(rows: StepRows, starts: Ints, slots: Slots) -> None:
    """Count the tokens of the step's chunks for those who are penalised for them; `starts` are the rows' positions."""
    for slot, start, tokens in zip(rows.slots[rows.num_decode :], starts[rows.num_decode :], rows.chunks, strict=True):
        if slots.edited[slot]:
            slots.count(int(slot), int(start), tokens.tolist())
