"""Collects what one step yields, row by row, and makes the StepResult; leaves computing it to the engine."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.rows import ScoredSpan
from services.gpu_worker.scoring import join, score, unscored
from services.gpu_worker.slots import Slots
from shared.messages.step import RowError, RowScores, StepCommand, StepResult
from shared.messages.stream import Scores

Ints = NDArray[np.int64]

NOTHING_ALLOWED = "no token is allowed"
NOT_FINITE = "the model's logits are not finite"


class Outcome:
    """One step's tokens, scores and row errors."""

    def __init__(self, num_outputs: int) -> None:
        self.tokens = np.full(num_outputs, -1, dtype="<i4")
        self._scores: list[RowScores] = []
        self._prompt_scores: list[RowScores] = []
        self._errors: dict[int, RowError] = {}

    def fail(self, slots: Slots, slot: int, detail: str) -> None:
        """The slot's request ends with an error; its rows in later steps are skipped."""
        slots.ended[slot] = True
        self._errors.setdefault(slot, RowError(slot=slot, detail=detail))

    @property
    def failed(self) -> Collection[int]:
        """The slots for which `fail` was called in this step."""
        return self._errors.keys()

    def count(self, outputs: slice) -> int:
        """How many of these have a token."""
        return int((self.tokens[outputs] >= 0).sum())

    def add_scores(self, output: int, scores: Scores) -> None:
        """Scores of the sampled token at index `output`."""
        self._scores.append(RowScores(row=output, scores=scores))

    def score_prompts(self, spans: Sequence[ScoredSpan], logits: torch.Tensor, slots: Slots) -> None:
        """Scores of known tokens; `logits` are those of all spans, one after the other."""
        start = 0
        for span in spans:
            part = logits[start : start + len(span.targets)]
            start += len(span.targets)
            if not bool(part.amax(1).isfinite().all()):
                self.fail(slots, span.slot, NOT_FINITE)
                continue
            spec = slots.spec_of(span.slot)
            blocks = [unscored(spec)] if span.leading_unscored else []
            if len(span.targets):
                blocks.append(score(part, span.targets, spec))
            self._prompt_scores.append(RowScores(row=span.prefill, scores=join(blocks)))

    def result(
        self, command: StepCommand, incarnation: int, forward_ms: float, mask_wait_ms: float, queue_ms: float
    ) -> StepResult:
        """The answer to `command`."""
        return StepResult(
            step_id=command.step_id,
            epoch=command.epoch,
            incarnation=incarnation,
            token_ids=self.tokens.tobytes(),
            scores=tuple(self._scores),
            prompt_scores=tuple(self._prompt_scores),
            errors=tuple(self._errors.values()),
            forward_ms=forward_ms,
            mask_wait_ms=mask_wait_ms,
            queue_ms=queue_ms,
        )
