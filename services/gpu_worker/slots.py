"""Slots: the worker's mirror of what the scheduler decided, one seat per running request.

Everything a step needs is a column over slots, so that a batch is gathered in a few operations. Everything that comes
from the wire is checked here; leaves the rows of one step to `rows`.

    slot   table (page ids)      page_counts  computed  last_token  remaining  ended
    0      17 4 9 . . .          3            41        311         87         no
    1      .                     0            0         -1          0          no      (free)
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.gpu_worker.edit_columns import EditColumns
from services.gpu_worker.faults import ProtocolError
from services.gpu_worker.logit_edits import SlotEdits
from services.gpu_worker.sampling_columns import SamplingColumns
from services.gpu_worker.scoring import ScoreSpec
from shared.messages.request import SamplingParams
from shared.messages.step import SlotOpen, StepCommand

Ints = NDArray[np.int64]
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class SlotLimits:
    """What bounds every index a command may carry."""

    max_slots: int
    num_pages: int
    page_size: int
    max_context: int
    vocab_size: int
    max_drafts: int = 0  # most guesses of one row
    keeps_hidden: bool = False  # hidden states of rows' last tokens, with their pages

    @property
    def max_pages(self) -> int:
        """Pages of the longest sequence."""
        return -(-self.max_context // self.page_size)


class Slots:
    """Raises ProtocolError where a command names what does not exist; after that only `reset` may follow."""

    def __init__(self, limits: SlotLimits) -> None:
        self.limits = limits
        n = limits.max_slots
        self.table = np.zeros((n, limits.max_pages), dtype=np.int32)
        self.sampling = SamplingColumns(n, limits.vocab_size)
        self.edit_columns = EditColumns(n)
        self.is_open = np.zeros(n, dtype=np.bool_)
        self.ended = np.zeros(n, dtype=np.bool_)
        self.lagging = np.zeros(n, dtype=np.bool_)  # has skipped decode rows, so `computed` is behind the scheduler's
        self.edited = np.zeros(n, dtype=np.bool_)
        self.scored = np.zeros(n, dtype=np.bool_)
        self.num_scored = self.num_edited = 0
        self.page_counts = np.zeros(n, dtype=np.int64)
        self.room = np.zeros(n, dtype=np.int64)  # most tokens its pages can hold
        self.computed = np.zeros(n, dtype=np.int64)
        self.last_token = np.full(n, -1, dtype=np.int64)
        self.remaining = np.zeros(n, dtype=np.int64)
        self.edits: list[SlotEdits | None] = [None] * n
        self.scores: list[ScoreSpec | None] = [None] * n
        self.stops: list[frozenset[int]] = [frozenset()] * n
        self.stops_of_all: Counter[int] = Counter()  # of the open slots
        self.refused: dict[int, str] = {}  # open slots whose request cannot be served, and why

    def reset(self) -> None:
        """Forget every request."""
        for slot in np.flatnonzero(self.is_open).tolist():
            self._close(slot)

    def apply(self, command: StepCommand) -> None:
        """Closes, then opens, then page appends."""
        if command.closes:
            for slot in column(command.closes).tolist():
                self.require_open(slot)
                self._close(slot)
        for opened in command.opens:
            self._open(opened)
        if command.page_slots or command.page_ids:
            self._append(column(command.page_slots), column(command.page_ids))

    def copy_pairs(self, command: StepCommand) -> tuple[Ints, Ints] | None:
        """Sources and targets of the command's page copies."""
        if not command.page_copies:
            return None
        pairs = column(command.page_copies)
        if len(pairs) % 2:
            raise ProtocolError("page_copies is no list of pairs")
        self._require_pages(pairs)
        sources, targets = pairs[0::2], pairs[1::2]
        if len(np.unique(targets)) != len(targets) or len(np.intersect1d(sources, targets)):
            raise ProtocolError("a page is the target of two copies, or source and target")
        return sources, targets

    def require_open(self, slot: int) -> None:
        """Raises ProtocolError unless `slot` is an open slot."""
        if not (0 <= slot < self.limits.max_slots and self.is_open[slot]):
            raise ProtocolError(f"slot {slot} is not open")

    def spec_of(self, slot: int) -> ScoreSpec:
        """What the slot's request wants of a scored position."""
        return self.scores[slot] or ScoreSpec(0, np.zeros(0, dtype=np.int64))

    def count(self, slot: int, position: int, tokens: list[int]) -> None:
        """Tokens of the slot's text from `position` on, for who is penalised for them."""
        edits = self.edits[slot]
        if edits is not None and edits.history is not None and edits.history.extend(position, tokens):
            self.edit_columns.follow(slot, edits)

    def _close(self, slot: int) -> None:
        self.is_open[slot] = False
        self._set_flags(slot, scored=False, edited=False)
        self._set_stops(slot, frozenset())
        self.edits[slot] = self.scores[slot] = None
        self.edit_columns.set(slot, None)
        self.refused.pop(slot, None)

    def _open(self, opened: SlotOpen) -> None:
        slot, pages = opened.slot, column(opened.pages)
        if not 0 <= slot < self.limits.max_slots or self.is_open[slot]:
            raise ProtocolError(f"slot {slot} cannot be opened")
        if len(pages) > self.limits.max_pages:
            raise ProtocolError(f"slot {slot} opens with {len(pages)} pages, at most {self.limits.max_pages}")
        if not 0 <= opened.num_computed <= len(pages) * self.limits.page_size:
            raise ProtocolError(f"slot {slot} opens with {opened.num_computed} tokens in {len(pages)} pages")
        if not 0 <= opened.prompt_length <= INT32_MAX:
            raise ProtocolError(f"slot {slot} opens with a prompt of {opened.prompt_length} tokens")
        self._require_pages(pages)
        self.is_open[slot] = True
        self.ended[slot] = self.lagging[slot] = False
        self.table[slot, : len(pages)] = pages
        self._set_pages(slot, len(pages))
        self.computed[slot] = opened.num_computed
        self.last_token[slot] = -1
        self.remaining[slot] = min(max(opened.remaining, 0), INT32_MAX)
        self._take_params(slot, opened)

    def _take_params(self, slot: int, opened: SlotOpen) -> None:
        params, vocab = opened.sampling, self.limits.vocab_size
        self._set_stops(slot, frozenset(params.stop_token_ids))
        self.edits[slot] = self.scores[slot] = None
        try:
            _require_numbers(params)
            self.sampling.set(slot, params)
            self.edits[slot] = SlotEdits.of(params, opened.prompt_length, vocab)
            self.scores[slot] = _score_spec(params, vocab)
        except ValueError as error:
            # Numbers a user chose: they end that request, never the worker.
            self.refused[slot] = str(error)
        self._set_flags(slot, scored=params.logprobs >= 0, edited=self.edits[slot] is not None)
        self._take_history(slot, opened)
        self.edit_columns.set(slot, self.edits[slot])

    def _set_flags(self, slot: int, *, scored: bool, edited: bool) -> None:
        self.num_scored += int(scored) - int(self.scored[slot])
        self.num_edited += int(edited) - int(self.edited[slot])
        self.scored[slot], self.edited[slot] = scored, edited

    def _set_stops(self, slot: int, stops: frozenset[int]) -> None:
        self.stops_of_all.subtract(self.stops[slot])
        self.stops_of_all.update(stops)
        for token in self.stops[slot]:
            if not self.stops_of_all[token]:
                del self.stops_of_all[token]
        self.stops[slot] = stops

    def _take_history(self, slot: int, opened: SlotOpen) -> None:
        edits = self.edits[slot]
        if edits is None or edits.history is None:
            return
        known = column(opened.history)
        if len(known) != opened.num_computed:
            raise ProtocolError(f"slot {slot} has {opened.num_computed} computed tokens, a history of {len(known)}")
        if len(known) and not (known.min() >= 0 and known.max() < self.limits.vocab_size):
            # The ids index logits; what a user may have sent ends that request.
            self.refused[slot] = f"a token is outside the vocabulary of {self.limits.vocab_size}"
            return
        edits.history.extend(0, known.tolist())

    def _append(self, slots: Ints, pages: Ints) -> None:
        if len(slots) != len(pages):
            raise ProtocolError("page_slots and page_ids have unequal lengths")
        self._require_pages(pages)
        for slot, page in zip(slots.tolist(), pages.tolist(), strict=True):
            self.require_open(slot)
            at = int(self.page_counts[slot])
            if at >= self.limits.max_pages:
                raise ProtocolError(f"slot {slot} has more pages than {self.limits.max_context} tokens need")
            self.table[slot, at] = page
            self._set_pages(slot, at + 1)

    def _set_pages(self, slot: int, count: int) -> None:
        self.page_counts[slot] = count
        self.room[slot] = min(count * self.limits.page_size, self.limits.max_context)

    def _require_pages(self, pages: Ints) -> None:
        if len(pages) and not (pages.min() >= 0 and pages.max() < self.limits.num_pages):
            raise ProtocolError(f"a page is outside 0 .. {self.limits.num_pages - 1}")


def column(data: bytes) -> Ints:
    """An int32 column of a message as int64 [n]. Raises ProtocolError where the length is no multiple of four."""
    if len(data) % 4:
        raise ProtocolError(f"an int32 column has {len(data)} bytes")
    return np.frombuffer(data, dtype="<i4").astype(np.int64)


def _require_numbers(params: SamplingParams) -> None:
    """NaN is neither above nor below any bound, so that no later check would find it."""
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
        if not math.isfinite(getattr(params, name)):
            raise ValueError(f"{name} is {getattr(params, name)}")


def _score_spec(params: SamplingParams, vocab_size: int) -> ScoreSpec | None:
    wanted = column(params.logprob_token_ids)
    if len(wanted) and not (wanted.min() >= 0 and wanted.max() < vocab_size):
        raise ValueError(f"logprob_token_ids names a token outside the vocabulary of {vocab_size}")
    return ScoreSpec(min(max(params.logprobs, 0), vocab_size), wanted)
