"""One command's rows, checked, without decode rows of ended slots; leaves tensors to `batch_builder`.

outputs   decode_slots in order, then the sampling prefills in order     (one token each in the result)
rows      decode rows of slots that have not ended, then all prefill rows, those without tokens last

Prefill rows run even where their slot has ended or its request is refused: the scheduler shares the pages of a prefill
from the moment it sends it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from services.gpu_worker.faults import ProtocolError
from services.gpu_worker.slots import Slots, column
from shared.messages.step import PrefillRow, StepCommand

Ints = NDArray[np.int64]
_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class ScoredSpan:
    """Prompt tokens one row scores: the logits of tokens `first`, `first` + 1, ... of the row, and their targets."""

    prefill: int  # index into the command's prefills
    slot: int
    row: int  # index into the rows of the step
    first: int
    targets: Ints
    leading_unscored: bool  # the span begins with token 0 of the prompt


@dataclass(frozen=True, slots=True)
class DraftRow:
    """A row that ends in guesses: it samples after the token before them and after each of them."""

    slot: int
    first: int  # of its samples, index into `sampling`
    guesses: list[int]
    outputs: slice  # of its samples, indices in the result's token_ids


@dataclass(slots=True)
class StepRows:
    """Columns over the R rows that run, decode rows first."""

    slots: Ints = field(default_factory=lambda: _NONE)
    lengths: Ints = field(default_factory=lambda: _NONE)
    num_decode: int = 0
    chunks: list[Ints] = field(default_factory=list)  # token ids of the prefill rows
    num_recalled: int = 0  # so many of these, the last ones, have none: the state behind their slot's last one is kept
    keeping: list[int] = field(default_factory=list)  # rows whose last token's state is to be kept
    sampling: Ints = field(default_factory=lambda: _NONE)  # [S] the row of each sample, in output order
    behind: Ints = field(default_factory=lambda: _NONE)  # [S] so many tokens before the row's last one it is drawn
    outputs: Ints = field(default_factory=lambda: _NONE)  # [S] its index in the result's token_ids
    drafts: list[DraftRow] = field(default_factory=list)
    num_outputs: int = 0
    num_tokens: int = 0
    output_of_slot: Mapping[int, int] = field(default_factory=dict)  # every sampling slot, also those that do not run
    spans: list[ScoredSpan] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)  # slot -> why its request cannot be served

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_computed(self) -> int:
        """Rows with tokens."""
        return len(self.slots) - self.num_recalled


def plan_rows(command: StepCommand, slots: Slots, max_batched_tokens: int) -> StepRows:
    """Check the command's rows against the slots and lay them out. Raises ProtocolError."""
    decode, output_of_slot = _decode_slots(command.decode_slots, slots.limits.max_slots)
    if len(decode) and not slots.is_open[decode].all():
        raise ProtocolError("a decode row's slot is not open")
    running, outputs = _running(decode, slots)
    count = len(running)
    rows = StepRows(running, _ONES.first(count), count, num_outputs=len(decode), num_tokens=count)
    rows.sampling, rows.behind, rows.outputs = _RISING.first(count), _ZEROS.first(count), outputs
    rows.output_of_slot = output_of_slot
    if command.prefills:
        _add_prefills(rows, command, slots)
    _require_room(rows, slots, max_batched_tokens)
    return rows


@lru_cache(maxsize=8)  # step after step the same slots decode
def _decode_slots(decode_slots: bytes, max_slots: int) -> tuple[Ints, dict[int, int]]:
    """The column, and the place of each slot in it. Raises ProtocolError."""
    decode = column(decode_slots)
    outputs = {slot: output for output, slot in enumerate(decode.tolist())}
    if len(outputs) != len(decode):
        raise ProtocolError("a slot has two decode rows")
    if len(decode) and not 0 <= min(outputs) <= max(outputs) < max_slots:
        raise ProtocolError("a decode row's slot is not open")
    decode.flags.writeable = False
    return decode, outputs


def _running(decode: Ints, slots: Slots) -> tuple[Ints, Ints]:
    """Which of the slots have not ended, and their places."""
    running, places = decode, _RISING.first(len(decode))
    goes_on = slots.remaining[decode] > 0
    goes_on &= ~slots.ended[decode]
    if not goes_on.all():
        places = np.flatnonzero(goes_on)
        running = decode[places]
        slots.lagging[decode[~goes_on]] = True
    if len(running) and slots.last_token[running].min() < 0:
        raise ProtocolError("a decode row's slot has sampled nothing yet")
    return running, places


def _add_prefills(rows: StepRows, command: StepCommand, slots: Slots) -> None:
    chunks = _chunks(rows, command.prefills, slots)
    which = np.array([prefill.slot for prefill in command.prefills], dtype=np.int64)
    ended, has_room = slots.ended[which].tolist(), (slots.remaining[which] > 0).tolist()
    disappointed = _compare(command.prefills, chunks, slots)
    lagging = slots.lagging[which].tolist()
    seen = set(rows.output_of_slot)
    output_of_slot = dict(rows.output_of_slot)
    added: list[int] = []
    recalled: list[int] = []
    num_computed = rows.num_decode + _num_with_tokens(chunks, lagging)
    sampling: list[int] = []
    behind: list[int] = []
    outputs: list[int] = []
    for index, (prefill, tokens) in enumerate(zip(command.prefills, chunks, strict=True)):
        slot, drafts = prefill.slot, prefill.drafts
        if slot in seen:
            raise ProtocolError(f"slot {slot} has two rows")
        seen.add(slot)
        output = -1
        if prefill.sample:
            output = output_of_slot[slot] = rows.num_outputs
            rows.num_outputs += 1 + drafts
        if drafts:
            _require_plain(prefill, slots)
        if index in disappointed:
            drafts = 0
        if lagging[index]:
            continue  # a decode row before this one was skipped, so its place is not where the scheduler thinks
        if len(tokens):
            row = rows.num_decode + len(added)
            added.append(slot)
            rows.chunks.append(tokens)
        else:
            row = num_computed + len(recalled)
            recalled.append(slot)
        if prefill.keep_hidden:
            rows.keeping.append(row)
        if ended[index] or slot in rows.errors:
            continue
        if prefill.sample and has_room[index]:
            if prefill.drafts:
                outs, guesses = slice(output, output + 1 + drafts), tokens[len(tokens) - drafts :].tolist()
                rows.drafts.append(DraftRow(slot, rows.num_decode + len(sampling), guesses, outs))
            sampling += [row] * (1 + drafts)
            behind += range(drafts, -1, -1)
            outputs += range(output, output + 1 + drafts)
        if prefill.score_from >= 0:
            rows.spans.extend(_span(index, row, prefill, tokens, int(slots.computed[slot])))
    rows.output_of_slot = output_of_slot
    rows.num_recalled = len(recalled)
    rows.chunks += [_NONE] * len(recalled)
    rows.slots = np.concatenate([rows.slots, np.array(added + recalled, dtype=np.int64)])
    rows.lengths = np.concatenate([rows.lengths, np.array([len(c) for c in rows.chunks], dtype=np.int64)])
    rows.num_tokens = int(rows.lengths.sum())
    rows.sampling = np.concatenate([rows.sampling, np.array(sampling, dtype=np.int64)])
    rows.behind = np.concatenate([rows.behind, np.array(behind, dtype=np.int64)])
    rows.outputs = np.concatenate([rows.outputs, np.array(outputs, dtype=np.int64)])


def _compare(prefills: Sequence[PrefillRow], chunks: list[Ints], slots: Slots) -> set[int]:
    """Rows whose slot was expected to stand elsewhere, or to have sampled something else: they become decode rows.

    Slots that have ended are lagging from then on. Raises ProtocolError.
    """
    disappointed: set[int] = set()
    for index, (prefill, tokens) in enumerate(zip(prefills, chunks, strict=True)):
        if prefill.start < 0:
            continue
        slot, last = prefill.slot, int(slots.last_token[prefill.slot])
        if len(tokens) != 1 + prefill.drafts or not prefill.sample or prefill.keep_hidden or prefill.score_from >= 0:
            raise ProtocolError(f"slot {slot} has an expected sample in a row that cannot have one")
        if last < 0 and not slots.ended[slot]:
            raise ProtocolError(f"slot {slot} has sampled nothing yet, where a sample was expected")
        if slots.ended[slot] or slots.remaining[slot] <= 0:
            slots.lagging[slot] = True
        elif last != tokens[0] or slots.computed[slot] != prefill.start:
            chunks[index] = np.array([last], dtype=np.int64)
            disappointed.add(index)
    return disappointed


def _num_with_tokens(chunks: list[Ints], lagging: list[bool]) -> int:
    return sum(len(tokens) > 0 and not behind for tokens, behind in zip(chunks, lagging, strict=True))


def _require_plain(prefill: PrefillRow, slots: Slots) -> None:
    """Raises ProtocolError where the row cannot end in guesses."""
    slot, edits = prefill.slot, slots.edits[prefill.slot]
    if not 0 < prefill.drafts <= slots.limits.max_drafts or 4 * prefill.drafts >= len(prefill.token_ids):
        raise ProtocolError(f"slot {slot} has a row with {prefill.drafts} guesses, at most {slots.limits.max_drafts}")
    if not prefill.sample or prefill.score_from >= 0 or prefill.next_token >= 0:
        raise ProtocolError(f"slot {slot} has guesses in a row that does not sample, or is scored")
    if slots.scored[slot] or (edits is not None and edits.history is not None):
        raise ProtocolError(f"slot {slot} has guesses, and scores or penalties")


def _chunks(rows: StepRows, prefills: Sequence[PrefillRow], slots: Slots) -> list[Ints]:
    """The tokens of each row. Those a user may have sent end that request where they are outside the vocabulary; only
    what the scheduler made up ends the worker's incarnation."""
    ends: list[int] = []
    for prefill in prefills:
        slots.require_open(prefill.slot)
        size = len(prefill.token_ids)
        if size % 4:
            raise ProtocolError(f"slot {prefill.slot} has a prefill row of {size} bytes")
        if not size or prefill.keep_hidden:
            _require_hidden(prefill, slots)
        ends.append((ends[-1] if ends else 0) + size // 4)
    tokens, vocab = column(b"".join([prefill.token_ids for prefill in prefills])), slots.limits.vocab_size
    strange = (tokens < 0) | (tokens >= vocab)
    tokens[strange] = 0
    some_strange, chunks, start = bool(strange.any()), [], 0
    for prefill, end in zip(prefills, ends, strict=True):
        chunks.append(tokens[start:end])
        detail = slots.refused.get(prefill.slot, "")
        if prefill.next_token >= vocab or (some_strange and strange[start:end].any()):
            detail = f"a token is outside the vocabulary of {vocab}"
        if detail and not slots.ended[prefill.slot]:
            rows.errors[prefill.slot] = detail
        start = end
    return chunks


def _require_hidden(prefill: PrefillRow, slots: Slots) -> None:
    """Raises ProtocolError where no hidden state can be kept or recalled."""
    slot, keeps, recalls = prefill.slot, prefill.keep_hidden, not prefill.token_ids
    if not slots.limits.keeps_hidden or keeps == recalls or prefill.drafts:
        raise ProtocolError(f"slot {slot} has a row of {len(prefill.token_ids)} bytes, and no hidden state to keep")
    if recalls and not (prefill.sample and prefill.score_from < 0 and prefill.next_token < 0):
        raise ProtocolError(f"slot {slot} has a row without tokens that does not sample, or is scored")
    if recalls and not slots.computed[slot]:
        raise ProtocolError(f"slot {slot} has a row without tokens, and none before it")


def _span(index: int, row: int, prefill: PrefillRow, tokens: Ints, start: int) -> list[ScoredSpan]:
    known = np.append(tokens, prefill.next_token) if prefill.next_token >= 0 else tokens
    first_scored = max(prefill.score_from, start + 1)
    targets = known[first_scored - start :]
    leading = start == 0 and prefill.score_from == 0
    if not len(targets) and not leading:
        return []
    return [ScoredSpan(index, prefill.slot, row, first_scored - 1 - start, targets, leading)]


def _require_room(rows: StepRows, slots: Slots, max_batched_tokens: int) -> None:
    if rows.num_tokens > max_batched_tokens:
        raise ProtocolError(f"a step of {rows.num_tokens} tokens, at most {max_batched_tokens}")
    ends = slots.computed[rows.slots] + rows.lengths
    too_far = ends > slots.room[rows.slots]
    if too_far.any():
        slot = int(rows.slots[np.argmax(too_far)])
        raise ProtocolError(
            f"slot {slot} would hold {slots.computed[slot]} tokens and more than its pages have room for"
        )


class _Fixed:
    """A column that is the same for any number of rows, as far as it is needed."""

    def __init__(self, make: Callable[[int], Ints]) -> None:
        self._make = make
        self._whole = make(0)

    def first(self, count: int) -> Ints:
        if count > len(self._whole):
            self._whole = self._make(2 * count)
            self._whole.flags.writeable = False
        return self._whole[:count]


_ONES = _Fixed(lambda count: np.ones(count, dtype=np.int64))
_ZEROS = _Fixed(lambda count: np.zeros(count, dtype=np.int64))
_RISING = _Fixed(lambda count: np.arange(count, dtype=np.int64))
