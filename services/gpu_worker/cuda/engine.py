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
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.cuda.device import GraphDevice
from services.gpu_worker.cuda.edits import DeviceEdits
from services.gpu_worker.cuda.forwarding import Forwarding, Layout, account, settle
from services.gpu_worker.cuda.graphs import DecodeGraphs
from services.gpu_worker.cuda.launched import Launched
from services.gpu_worker.cuda.masks import MaskUpload
from services.gpu_worker.cuda.sampler import DeviceSampler
from services.gpu_worker.cuda.sampling import draw_arrays, sample_on_device
from services.gpu_worker.engine import Engine, MaskSource, StepStats, extend_histories
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.outcome import Outcome
from services.gpu_worker.pipeline import DEPTH
from services.gpu_worker.sampling import sample_rows, take_masks
from services.gpu_worker.slots import Slots, column
from shared.messages.step import StepCommand, StepResult

Ints = NDArray[np.int64]


class Ranks(Protocol):
    """The ranks behind this one: they launch what it launches, and settle it when it does."""

    def launch(self, command: StepCommand, *, deferred: bool) -> None:
        """The command has been found sound; its forward is enqueued next."""
        ...

    def share(self, tokens: torch.Tensor) -> None:
        """What was drawn, int64 [n] on the device, in the order of its stream; not for deferred steps."""
        ...

    def settle(self, tokens: Ints) -> None:
        """What the oldest step under way has drawn, of the rows that still count."""
        ...

    def settle_deferred(self, command: StepCommand, slots: Slots) -> None:
        """The slots after the oldest step under way, which was deferred."""
        ...


class PipelinedEngine:
    """An engine's slots and model, driven in two halves. Between launch and complete nothing else may drive them."""

    def __init__(
        self, engine: Engine, device: GraphDevice, graphs: DecodeGraphs | None = None, ranks: Ranks | None = None
    ) -> None:
        self._engine = engine
        self.slots = engine.slots
        self._forwarding = Forwarding(engine, device, graphs)
        self._staging, self._state = self._forwarding.staging, self._forwarding.state
        self._ranks = ranks
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
        layout = self._forwarding.lay_out(command)
        who, positions = layout.who, layout.positions
        layout.arrays |= self._edits.seat(command) | self._edits.chunks(layout.rows, layout.starts)
        deferred = self._is_deferred(layout)
        if not deferred:
            shape, draws = draw_arrays(self.slots.sampling.rows(who, positions))
            layout.arrays |= draws | self._edits.draws(who, positions)
        if self._ranks is not None:
            self._ranks.launch(command, deferred=deferred)
        step, sent = self._forwarding.enqueue(layout, deferred=deferred)
        self._edits.update(sent)
        if not deferred and len(who):
            assert step.logits is not None
            self._edits.apply(step.logits, sent)
            tokens = sample_on_device(step.logits, shape, sent)
            self._edits.count(tokens, sent)
            self._keep_tokens(step, tokens, sent["who"])
        step.done.record()
        account(step, who, self.slots)
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
        self._flight.popleft()
        if step.deferred:
            if self._ranks is not None:
                self._ranks.settle_deferred(step.command, self.slots)
        else:
            tokens = step.drawn()
            settle(step, tokens, self.slots, self._flight, outcome)
            if self._ranks is not None:
                self._ranks.settle(tokens)
        self._count(step, waited_ms)
        return outcome.result(step.command, incarnation, self.stats.forward_ms, waited_ms, queue_ms)

    def _is_deferred(self, layout: Layout) -> bool:
        slots, who = self.slots, layout.who
        if layout.command.masked_slots or layout.rows.spans or slots.scored[who].any():
            return True
        return any(self._edits.defers(slot) for slot in who[slots.edited[who]].tolist())

    def _keep_tokens(self, step: Launched, tokens: torch.Tensor, who: torch.Tensor) -> None:
        """For the next step where it looks for them, on every rank, and for the host."""
        if self._ranks is not None:
            self._ranks.share(tokens)
        self._state.keep(tokens, who)
        place = self._results[self._launches % DEPTH]
        step.tokens = place[: len(tokens)]
        step.tokens.copy_(tokens, non_blocking=True)
        step.logits = None
        self._launches += 1

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
            sent = self._staging.send({"who": who, "tokens": tokens, **counted})
            self._state.keep(sent["tokens"], sent["who"])
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
