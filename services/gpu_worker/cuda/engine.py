"""The engine of a device: a step in two halves, so that the next step is enqueued before this one's tokens are known.

launch(t)     slots, page tables, forward, sampling: all enqueued, nothing awaited
launch(t+1)   its decode rows take the tokens of t where sampling left them, on the device
complete(t)   tokens of t by pinned memory; a slot that ended here is struck out of t+1, whose row of it has run in vain

What comes out is what `engine.Engine` answers to the same commands. Steps with masks or scores are *deferred*: their
forward is enqueued ahead like any other, but sampled by `complete`, and the step after them is launched then. For masks
come from automata of the scheduler, which have to read the tokens of the step before, and scores are the host's.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.batch_builder import build_batch
from services.gpu_worker.cuda.device import GraphDevice
from services.gpu_worker.cuda.edits import DeviceEdits
from services.gpu_worker.cuda.graphs import DecodeGraphs
from services.gpu_worker.cuda.launched import Launched
from services.gpu_worker.cuda.masks import MaskUpload
from services.gpu_worker.cuda.sampler import DeviceSampler
from services.gpu_worker.cuda.sampling import NO_TOKEN, draw_arrays, sample_on_device
from services.gpu_worker.cuda.staging import Staging
from services.gpu_worker.cuda.state import DeviceState, batch_arrays, table_changes
from services.gpu_worker.engine import Engine, MaskSource, StepStats, extend_histories
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.outcome import NOT_FINITE, NOTHING_ALLOWED, Outcome
from services.gpu_worker.pipeline import DEPTH
from services.gpu_worker.rows import StepRows, plan_rows
from services.gpu_worker.sampling import extend_answers, may_stop, sample_rows, take_masks
from services.gpu_worker.slots import column
from shared.messages.step import StepCommand, StepResult

Ints = NDArray[np.int64]
HOST = torch.device("cpu")


class PipelinedEngine:
    """An engine's slots and model, driven in two halves. Between launch and complete nothing else may drive them."""

    def __init__(self, engine: Engine, device: GraphDevice, graphs: DecodeGraphs | None = None) -> None:
        self._engine = engine
        self.slots = engine.slots
        self._device = device
        self._graphs = graphs
        self._staging = Staging(device)
        self._state = DeviceState(engine.slots.limits, device.device)
        self._edits = DeviceEdits(engine.slots, device.device)
        self._sampler = DeviceSampler(self._staging)
        self._masks = MaskUpload(device)
        results = device.pinned(DEPTH * 8 * engine.slots.limits.max_slots)
        self._results = results.view(torch.int64).view(DEPTH, -1)
        self._launches = 0
        self._flight: deque[Launched] = deque()
        self.stats = StepStats()

    @property
    def kv_cache(self) -> KVCache:
        return self._engine.kv_cache

    def reset(self) -> None:
        """Forget all requests and what is under way."""
        self._flight.clear()
        self._edits.reset()
        self._engine.reset()

    def execute(self, command: StepCommand, masks: MaskSource, incarnation: int, queue_ms: float = 0.0) -> StepResult:
        """Both halves at once."""
        return self.complete(self.launch(command), masks, incarnation, queue_ms)

    def must_complete_before(self, command: StepCommand) -> bool:
        """Whether a step under way would lose what it has to settle, or is not sampled yet. Raises ProtocolError."""
        if not self._flight:
            return False
        closed = column(command.closes)
        return any(step.deferred or step.has_row_of(closed) for step in self._flight)

    @torch.inference_mode()
    def launch(self, command: StepCommand) -> Launched:
        """Apply the command and enqueue its work. Raises ProtocolError and whatever the model raises."""
        slots = self.slots
        slots.apply(command)
        copies = slots.copy_pairs(command)
        rows = plan_rows(command, slots, self._engine.max_batched_tokens)
        arrays = table_changes(command, slots) | self._edits.seat(command)
        if copies is not None:
            arrays["copy_sources"], arrays["copy_targets"] = copies
        host = build_batch(rows, command, slots, HOST) if rows.num_rows else None
        if host is not None:
            arrays |= batch_arrays(host, rows.slots)
        who = rows.slots[rows.sampling]
        starts = slots.computed[rows.slots]
        positions = (starts + rows.lengths)[rows.sampling]
        event = self._device.event
        step = Launched(command, rows, starts, self._is_deferred(command, rows, who), event(), event(), event())
        arrays |= self._edits.chunks(rows, starts)
        if not step.deferred:
            shape, draws = draw_arrays(slots.sampling.rows(who, positions))
            arrays |= draws | self._edits.draws(who, positions)
            arrays["who"] = who
        sent = self._staging.send(arrays)
        self._state.update(sent)
        self._edits.update(sent)
        if copies is not None:
            self.kv_cache.copy_pages(sent["copy_sources"], sent["copy_targets"])
        step.begun.record()
        if host is not None:
            step.logits, step.is_graph = self._forward(self._state.batch(host, sent))
        step.forwarded.record()
        if not step.deferred and len(who):
            assert step.logits is not None
            self._edits.apply(step.logits, sent)
            tokens = sample_on_device(step.logits, shape, sent)
            self._edits.count(tokens, sent)
            self._keep_tokens(step, tokens, sent["who"])
        step.done.record()
        self._account(step, who)
        self._flight.append(step)
        return step

    @torch.inference_mode()
    def complete(self, step: Launched, masks: MaskSource, incarnation: int, queue_ms: float = 0.0) -> StepResult:
        """Wait for the oldest step under way and answer it. Raises as Engine.execute."""
        assert step is self._flight[0]
        outcome = Outcome(step.rows.num_outputs)
        for slot, detail in step.rows.errors.items():
            outcome.fail(self.slots, slot, detail)
        waited_ms = self._sample_deferred(step, masks, outcome) if step.deferred else 0.0
        step.wait()
        if not step.deferred:
            self._settle(step, outcome)
        self._flight.popleft()
        self._count(step, waited_ms)
        return outcome.result(step.command, incarnation, self.stats.forward_ms, waited_ms, queue_ms)

    def _is_deferred(self, command: StepCommand, rows: StepRows, who: Ints) -> bool:
        if command.masked_slots or rows.spans or self.slots.scored[who].any():
            return True
        return any(self._edits.defers(slot) for slot in who[self.slots.edited[who]].tolist())

    def _forward(self, batch: ForwardBatch) -> tuple[torch.Tensor, bool]:
        """float32 logits, and whether a graph made them: then they stay until its next replay."""
        if self._graphs is not None and (logits := self._graphs.forward(batch)) is not None:
            return logits, True
        return self._engine.runner.forward(batch), False

    def _keep_tokens(self, step: Launched, tokens: torch.Tensor, who: torch.Tensor) -> None:
        """For the next step where it looks for them, and for the host."""
        self._state.last_token[who] = tokens.clamp(min=0)
        place = self._results[self._launches % DEPTH]
        step.tokens = place[: len(tokens)]
        step.tokens.copy_(tokens, non_blocking=True)
        step.logits = None
        self._launches += 1

    def _account(self, step: Launched, who: Ints) -> None:
        """What is known of the step's end: all but its tokens."""
        slots, rows = self.slots, step.rows
        slots.computed[rows.slots] += rows.lengths
        slots.ended[list(rows.errors)] = True
        if not step.deferred:
            slots.last_token[who] = 0  # it has one
            slots.remaining[who] -= 1
            slots.ended[who] |= slots.remaining[who] <= 0

    def _settle(self, step: Launched, outcome: Outcome) -> None:
        slots, rows = self.slots, step.rows
        extend_histories(rows, step.starts, slots)
        if step.tokens is None:
            return
        who = rows.slots[rows.sampling]
        positions = (step.starts + rows.lengths)[rows.sampling]
        tokens = step.tokens.numpy()[step.keep]
        for slot, token, position in zip(who.tolist(), tokens.tolist(), positions.tolist(), strict=True):
            if token < 0:
                outcome.fail(slots, slot, NOTHING_ALLOWED if token == NO_TOKEN else NOT_FINITE)
            elif token not in slots.stops[slot] or not may_stop(slots, slot, position):
                continue
            slots.ended[slot] = True
            for later in self._flight:
                if later is not step:
                    later.skip(slot, slots)
        slots.last_token[who] = outcome.tokens[rows.outputs] = np.maximum(tokens, -1)
        extend_answers(who, positions, tokens, slots)

    def _sample_deferred(self, step: Launched, masks: MaskSource, outcome: Outcome) -> float:
        """As the engine in one piece does it; returns how long the masks were waited for, in milliseconds."""
        slots, rows = self.slots, step.rows
        asked = time.perf_counter()
        held = take_masks(step.command, masks, rows, slots.limits.vocab_size)
        waited_ms = (time.perf_counter() - asked) * 1e3 if step.command.masked_slots else 0.0
        if step.logits is None:
            return waited_ms
        logits, sampling = step.logits, len(rows.sampling)
        if len(step.keep) < len(logits):
            logits = logits[torch.from_numpy(step.keep).to(logits.device)]
        outcome.score_prompts(rows.spans, logits[sampling:], slots)
        extend_histories(rows, step.starts, slots)
        if sampling:
            sample_rows(rows, logits[:sampling], held, slots, self._sampler, outcome, self._masks.apply)
            who = rows.slots[rows.sampling]
            tokens = slots.last_token[who]
            counted = self._edits.answered(who, slots.computed[who], tokens)
            sent = self._staging.send({"who": who, "tokens": np.maximum(tokens, 0), **counted})
            self._state.last_token[sent["who"]] = sent["tokens"]
            self._edits.update(sent)
        step.done.record()
        return waited_ms

    def _count(self, step: Launched, waited_ms: float) -> None:
        rows, in_vain = step.rows, len(step.skipped)
        self.stats = StepStats(
            decode_rows=rows.num_decode - in_vain,
            prefill_rows=rows.num_rows - rows.num_decode,
            tokens=int(rows.lengths.sum()) - in_vain,
            forward_ms=step.begun.ms_at(step.forwarded),
            mask_wait_ms=waited_ms,
            sample_ms=step.forwarded.ms_at(step.done),
            kv_bytes_read=self._engine.runner.kv_bytes_read,
            is_cuda_graph=step.is_graph,
        )
