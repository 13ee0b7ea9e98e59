"""From logits to tokens within a step: masks, edits, raw scores, the draw, and what it changes in the slots.

Leaves the choice itself to `sampler` and the order of things in a step to `engine`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.faults import ProtocolError
from services.gpu_worker.kernels.logits import Blocks, edit_rows, mask_rows
from services.gpu_worker.logit_edits import RowEdit, allows_more_than_stops, apply_edits, apply_masks
from services.gpu_worker.outcome import NOT_FINITE, NOTHING_ALLOWED, Outcome
from services.gpu_worker.rows import StepRows
from services.gpu_worker.sampling_columns import SampleRows
from services.gpu_worker.scoring import score_each
from services.gpu_worker.slots import Slots, column
from shared.messages.step import StepCommand

Ints = NDArray[np.int64]
MaskApplier = Callable[[torch.Tensor, Ints, NDArray[np.uint32]], None]  # as logit_edits.apply_masks


class TokenSampler(Protocol):
    """What chooses: `sampler.Sampler`, or the same on a device."""

    def sample(
        self, logits: torch.Tensor, rows: SampleRows, blocks: Blocks | None = None
    ) -> tuple[Ints, NDArray[np.bool_]]:
        """Tokens [n], -1 where a row is not fit, and which rows are fit; logits float32 [n, vocab]."""
        ...


@dataclass(frozen=True, slots=True)
class Raw:
    """Logits as the model made them, which scores are of, and what is known of their blocks."""

    logits: torch.Tensor
    blocks: Blocks | None

    def copy(self) -> Raw:
        """For where the logits are going to be edited."""
        return Raw(self.logits.clone(), None if self.blocks is None else self.blocks.copy())

    def take(self, rows: Ints) -> Raw:
        where = torch.from_numpy(rows).to(self.logits.device)
        return Raw(self.logits[where], None if self.blocks is None else self.blocks.take(where))


@dataclass(frozen=True, slots=True)
class MaskRows:
    """Bitmasks of the rows that sample in this step."""

    rows: Ints  # [m], indices into the sampling rows
    words: NDArray[np.uint32]  # [m, ceil(vocab / 32)]


def take_masks(
    command: StepCommand, source: Callable[[int], tuple[bytes, bytes]], rows: StepRows, vocab_size: int
) -> MaskRows | None:
    """Wait for the one TokenMasks a masked step is owed, even when none of its rows runs."""
    if not command.masked_slots:
        return None
    masked = _masked_outputs(command, rows)
    slots, data = source(command.step_id)
    words = -(-vocab_size // 32)
    if slots != command.masked_slots or len(data) != len(masked) * words * 4:
        raise ProtocolError(f"the masks of step {command.step_id} do not fit its masked slots")
    row_of = {int(output): row for row, output in enumerate(rows.outputs)}
    present = [(i, row_of[output]) for i, output in enumerate(masked) if output in row_of]
    bits = np.frombuffer(data, dtype="<u4").reshape(len(masked), words)
    return MaskRows(np.array([r for _, r in present], dtype=np.int64), bits[[i for i, _ in present]])


def _masked_outputs(command: StepCommand, rows: StepRows) -> list[int]:
    """The output that each mask is for. Raises ProtocolError unless a masked slot has one for each of its samples."""
    masked = column(command.masked_slots).tolist()
    samples = {row.slot: 1 + row.drafts for row in command.prefills}
    outputs: list[int] = []
    seen: Counter[int] = Counter()
    for slot in masked:
        if slot not in rows.output_of_slot:
            raise ProtocolError(f"masked slot {slot} has no sampling row")
        outputs.append(rows.output_of_slot[slot] + seen[slot])
        seen[slot] += 1
    if any(count != samples.get(slot, 1) for slot, count in seen.items()):
        raise ProtocolError(f"masked slots {masked} are not one for each sample")
    return outputs


def sample_rows(
    rows: StepRows,
    logits: torch.Tensor,
    masks: MaskRows | None,
    slots: Slots,
    sampler: TokenSampler,
    outcome: Outcome,
    forbid: MaskApplier = apply_masks,
    blocks: Blocks | None = None,
) -> None:
    """Draw every sample; logits float32 [S, vocab], `slots.computed` already counts this step.

    Of rows that end in guesses it is taken back to what was right. `blocks`: of the logits, where they are known.
    """
    who = rows.slots[rows.sampling]
    positions = slots.computed[who] - rows.behind
    raw = Raw(logits, blocks)
    edited = slots.num_edited > 0 and bool(slots.edited[who].any())
    if masks is not None or edited:
        if slots.num_scored and slots.scored[who].any():
            raw = raw.copy()
        _edit(logits, blocks, who, positions, masks, slots, forbid)
    tokens, fit = sampler.sample(logits, slots.sampling.rows(who, positions), blocks)
    counts = drop_refuted(rows, tokens, fit, slots) if rows.drafts else None
    if outcome.failed:
        _drop_failed(who, tokens, fit, outcome)
    drawn = tokens
    if not fit.all():
        for row in np.flatnonzero(~fit).tolist():
            outcome.fail(slots, int(who[row]), _why_unfit(raw.logits, row))
    if slots.num_scored:
        _score(raw, who, tokens, fit, rows, slots, outcome)
    if counts is not None:
        who, positions, drawn = who[counts], positions[counts], tokens[counts]
    _settle(who, positions, drawn, slots, is_distinct=not rows.drafts)
    if edited:
        extend_answers(who, positions, drawn, slots)
    outcome.tokens[rows.outputs] = tokens


def drop_refuted(rows: StepRows, tokens: Ints, fit: NDArray[np.bool_], slots: Slots) -> NDArray[np.bool_]:
    """Which samples [S] count: of a row with guesses those up to the first sample that is not the guess behind it.

    The others have no token and nothing is wrong with them; `slots.computed` no longer counts their guesses.
    """
    counts = np.ones(len(tokens), dtype=np.bool_)
    drawn, is_fit = tokens.tolist(), fit.tolist()
    for draft in rows.drafts:
        slot, first, guesses = draft.slot, draft.first, draft.guesses
        most, kept = min(len(guesses) + 1, int(slots.remaining[slot])), 1
        position, stops = int(slots.computed[slot]) - len(guesses), slots.stops[slot]
        while kept < most and is_fit[first + kept - 1] and (token := drawn[first + kept - 1]) == guesses[kept - 1]:
            if token in stops and may_stop(slots, slot, position + kept - 1):
                break
            kept += 1
        refuted = slice(first + kept, first + len(guesses) + 1)
        counts[refuted], tokens[refuted], fit[refuted] = False, -1, True
        slots.computed[slot] -= len(guesses) + 1 - kept
    return counts


def may_stop(slots: Slots, slot: int, position: int) -> bool:
    """Whether a stop token drawn at `position` ends the slot's answer."""
    edits = slots.edits[slot]
    return edits is None or not edits.forbids_stop(position)


def _edit(
    logits: torch.Tensor,
    blocks: Blocks | None,
    who: Ints,
    positions: Ints,
    masks: MaskRows | None,
    slots: Slots,
    forbid: MaskApplier,
) -> None:
    if slots.edited[who].any():
        keeps = None if masks is None else _keeps_stops(who, positions, masks, slots)
        if blocks is not None:
            edit_rows(logits, blocks, slots.edit_columns, who, positions, keeps)
        else:
            apply_edits(logits, _row_edits(who, positions, keeps, slots))
    if masks is None or not len(masks.rows):
        return
    if blocks is not None:
        mask_rows(logits, blocks, masks.rows, masks.words, slots.sampling.greedy[who[masks.rows]])
    else:
        forbid(logits, masks.rows, masks.words)


def _keeps_stops(who: Ints, positions: Ints, masks: MaskRows, slots: Slots) -> NDArray[np.bool_]:
    """A constraint that allows nothing but the end wins over min_new_tokens."""
    keeps = np.zeros(len(who), dtype=np.bool_)
    for row, words in zip(masks.rows.tolist(), masks.words, strict=True):
        edits = slots.edits[int(who[row])]
        if edits is not None and edits.forbids_stop(int(positions[row])):
            keeps[row] = not allows_more_than_stops(words, edits)
    return keeps


def _row_edits(who: Ints, positions: Ints, keeps: NDArray[np.bool_] | None, slots: Slots) -> list[RowEdit]:
    edited = [(row, slots.edits[int(who[row])]) for row in np.flatnonzero(slots.edited[who]).tolist()]
    return [
        RowEdit(row, int(positions[row]), edits, keeps is None or not keeps[row])
        for row, edits in edited
        if edits is not None
    ]


def _drop_failed(who: Ints, tokens: Ints, fit: NDArray[np.bool_], outcome: Outcome) -> None:
    for slot in outcome.failed:
        tokens[who == slot], fit[who == slot] = -1, False


def _why_unfit(raw: torch.Tensor, row: int) -> str:
    peak = raw[row].amax()
    return NOTHING_ALLOWED if bool(peak.isfinite()) or peak == float("-inf") else NOT_FINITE


def _score(
    raw: Raw, who: Ints, tokens: Ints, fit: NDArray[np.bool_], rows: StepRows, slots: Slots, outcome: Outcome
) -> None:
    scored = np.flatnonzero(slots.scored[who] & fit)
    if not len(scored):
        return
    part = raw if len(scored) == len(who) else raw.take(scored)
    specs = [slots.spec_of(slot) for slot in who[scored].tolist()]
    found = score_each(part.logits, tokens[scored], specs, part.blocks)
    for output, scores in zip(rows.outputs[scored].tolist(), found, strict=True):
        outcome.add_scores(output, scores)


def _settle(who: Ints, positions: Ints, tokens: Ints, slots: Slots, *, is_distinct: bool) -> None:
    """`is_distinct`: no slot is there several times."""
    slots.last_token[who] = tokens
    if is_distinct:
        remaining = slots.remaining[who] - 1
        slots.remaining[who] = remaining
    else:
        slots.remaining -= np.bincount(who, minlength=len(slots.remaining))
        remaining = slots.remaining[who]
    if remaining.min(initial=1) <= 0:
        slots.ended[who[remaining <= 0]] = True
    drawn = tokens.tolist()
    if slots.stops_of_all.keys().isdisjoint(drawn):
        return
    for row, (slot, token) in enumerate(zip(who.tolist(), drawn, strict=True)):
        if token in slots.stops[slot]:
            slots.ended[slot] |= may_stop(slots, slot, int(positions[row]))


def extend_answers(who: Ints, positions: Ints, tokens: Ints, slots: Slots) -> None:
    """Count tokens [n] drawn for slots `who` at `positions`, -1 or less: none, for those who are penalised for them."""
    if not slots.edited[who].any():
        return
    for slot, position, token in zip(who.tolist(), positions.tolist(), tokens.tolist(), strict=True):
        if token >= 0 and slots.edits[slot] is not None:
            slots.count(slot, position, [token])
