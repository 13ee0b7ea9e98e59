"""A step between its two halves, and how it forgets a row that turns out to have ended. Leaves both to `engine`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.cuda.device import Event
from services.gpu_worker.rows import StepRows
from services.gpu_worker.slots import Slots
from shared.messages.step import StepCommand

Ints = NDArray[np.int64]


@dataclass(slots=True)
class Launched:
    """What was enqueued for one command.

    `deferred` steps have their logits and are sampled by `complete`; of the others only the tokens come back.
    """

    command: StepCommand
    rows: StepRows
    starts: Ints  # [R] tokens each row's slot had computed before
    deferred: bool
    begun: Event
    forwarded: Event
    done: Event
    logits: torch.Tensor | None = None
    tokens: torch.Tensor | None = None  # int64 [sampling rows], pinned; valid once `done`
    is_graph: bool = False
    keep: Ints = field(init=False)  # of the logits' rows (the sampling rows first) those that still count
    skipped: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.keep = np.arange(len(self.rows.sampling) + sum(len(s.targets) for s in self.rows.spans))

    def wait(self) -> None:
        """Hold the calling thread until the device has done what is enqueued of it. Raises what went wrong there."""
        self.done.wait()

    def drawn(self) -> Ints:
        """The tokens of the sampling rows that still count, once they are there; not for deferred steps."""
        return np.zeros(0, dtype=np.int64) if self.tokens is None else self.tokens.numpy()[self.keep]

    def has_row_of(self, slots: Ints) -> bool:
        """Whether what is still to come of this step concerns any of `slots`."""
        return any(slot in self.rows.slots and slot not in self.skipped for slot in slots.tolist())

    def skip(self, slot: int, slots: Slots) -> None:
        """The slot had ended when this step was launched, which nobody knew: nothing of its row counts.

        A decode row did not take place; of a prefill row only its keys and values did.
        """
        rows = self.rows
        found = np.flatnonzero(rows.slots == slot)
        if not len(found):
            return
        row = int(found[0])
        samples = rows.sampling == row
        if row < rows.num_decode:
            slots.lagging[slot] = True
            slots.computed[slot] -= 1
            self.skipped.add(slot)
        if samples.any() and not self.deferred:
            slots.remaining[slot] += 1
        rows.errors.pop(slot, None)
        self._drop(samples, slot)

    def _drop(self, samples: NDArray[np.bool_], slot: int) -> None:
        rows = self.rows
        gone = [samples, *(np.full(len(span.targets), span.slot == slot) for span in rows.spans)]
        self.keep = self.keep[~np.concatenate(gone)]
        rows.sampling, rows.outputs = rows.sampling[~samples], rows.outputs[~samples]
        rows.behind = rows.behind[~samples]
        rows.spans = [span for span in rows.spans if span.slot != slot]
