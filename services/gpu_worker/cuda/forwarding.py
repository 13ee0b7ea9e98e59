"""A step's inputs brought to the device and its forward enqueued: what all ranks do alike, and how it is accounted for.

Leaves sampling, results and what the other ranks are told to `engine`, and following it to `following`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.batch_builder import build_batch
from services.gpu_worker.cuda.device import GraphDevice
from services.gpu_worker.cuda.graphs import DecodeGraphs
from services.gpu_worker.cuda.launched import Launched
from services.gpu_worker.cuda.sampling import NO_TOKEN
from services.gpu_worker.cuda.staging import Staging
from services.gpu_worker.cuda.state import Arrays, DeviceState, batch_arrays, table_changes
from services.gpu_worker.engine import Engine, extend_histories
from services.gpu_worker.outcome import NOT_FINITE, NOTHING_ALLOWED, Outcome
from services.gpu_worker.rows import StepRows, plan_rows
from services.gpu_worker.sampling import extend_answers, may_stop
from services.gpu_worker.slots import Slots
from shared.messages.step import StepCommand

Ints = NDArray[np.int64]
HOST = torch.device("cpu")


@dataclass(slots=True)
class Layout:
    """A command that has been applied to the slots: its rows, and what the device will need of it."""

    command: StepCommand
    rows: StepRows
    starts: Ints  # [R] tokens each row's slot had computed before
    host: ForwardBatch | None  # None: no row runs
    arrays: Arrays
    who: Ints = field(init=False)  # [S] slots of the rows that sample
    positions: Ints = field(init=False)  # [S] of the tokens they draw

    def __post_init__(self) -> None:
        self.who = self.rows.slots[self.rows.sampling]
        self.positions = (self.starts + self.rows.lengths)[self.rows.sampling]
        self.arrays["who"] = self.who


class Forwarding:
    """One rank's model, driven in the order of the compute stream."""

    def __init__(self, engine: Engine, device: GraphDevice, graphs: DecodeGraphs | None = None) -> None:
        self._engine, self._device, self._graphs = engine, device, graphs
        self.staging = Staging(device)
        self.state = DeviceState(engine.slots.limits, device.device)

    def lay_out(self, command: StepCommand) -> Layout:
        """Apply the command to the slots. Raises ProtocolError; nothing has been enqueued yet."""
        slots = self._engine.slots
        slots.apply(command)
        copies = slots.copy_pairs(command)
        rows = plan_rows(command, slots, self._engine.max_batched_tokens)
        arrays = table_changes(command, slots)
        if copies is not None:
            arrays["copy_sources"], arrays["copy_targets"] = copies
        host = build_batch(rows, command, slots, HOST, with_tables=False) if rows.num_rows else None
        if host is not None:
            arrays |= batch_arrays(host, rows.slots)
        return Layout(command, rows, slots.computed[rows.slots], host, arrays)

    def enqueue(self, layout: Layout, *, deferred: bool) -> tuple[Launched, dict[str, torch.Tensor]]:
        """The step with its logits, and the layout's arrays on the device."""
        event = self._device.event
        step = Launched(layout.command, layout.rows, layout.starts, deferred, event(), event(), event())
        sent = self.staging.send(layout.arrays)
        self.state.update(sent)
        if "copy_sources" in sent:
            self._engine.kv_cache.copy_pages(sent["copy_sources"], sent["copy_targets"])
        step.begun.record()
        if layout.host is not None:
            step.logits, step.is_graph = self._forward(self.state.batch(layout.host, sent))
        step.forwarded.record()
        return step, sent

    def _forward(self, batch: ForwardBatch) -> tuple[torch.Tensor, bool]:
        """float32 logits, and whether a graph made them: then they stay until its next replay."""
        if self._graphs is not None and (logits := self._graphs.forward(batch)) is not None:
            return logits, True
        return self._engine.runner.forward(batch), False


def account(step: Launched, who: Ints, slots: Slots) -> None:
    """What is known of the step's end once it is launched: all but its tokens."""
    rows = step.rows
    slots.computed[rows.slots] += rows.lengths
    slots.ended[list(rows.errors)] = True
    if not step.deferred:
        slots.last_token[who] = 0  # it has one
        slots.remaining[who] -= 1
        slots.ended[who] |= slots.remaining[who] <= 0


def settle(step: Launched, tokens: Ints, slots: Slots, later: Iterable[Launched], outcome: Outcome) -> None:
    """What tokens of the sampling rows that still count mean for the slots, for the steps `later`, for the answer."""
    rows = step.rows
    extend_histories(rows, step.starts, slots)
    who = rows.slots[rows.sampling]
    positions = (step.starts + rows.lengths)[rows.sampling]
    for slot, token, position in zip(who.tolist(), tokens.tolist(), positions.tolist(), strict=True):
        if token < 0:
            outcome.fail(slots, slot, NOTHING_ALLOWED if token == NO_TOKEN else NOT_FINITE)
        elif token not in slots.stops[slot] or not may_stop(slots, slot, position):
            continue
        slots.ended[slot] = True
        for other in later:
            other.skip(slot, slots)
    slots.last_token[who] = outcome.tokens[rows.outputs] = np.maximum(tokens, -1)
    extend_answers(who, positions, tokens, slots)
