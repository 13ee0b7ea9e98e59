"""Penalties, biases and forbidden stops on the device, so that a step with them is sampled where its logits are.

How often a request has seen each token is counted in a row of the device, from tokens that never visit the host before.
The arithmetic is that of `logit_edits`, operation by operation, over whole rows of the vocabulary instead of the tokens
that were seen. Leaves masks to deferred steps, which use `logit_edits` itself.

    code of a token   0: never seen, else 1 + 2 * (times in the answer)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from services.gpu_worker.faults import is_out_of_memory
from services.gpu_worker.logit_edits import SlotEdits
from services.gpu_worker.memory import MIB
from services.gpu_worker.rows import StepRows
from services.gpu_worker.slots import Slots, column
from shared.messages.step import StepCommand

log = structlog.get_logger(__name__)

Ints = NDArray[np.int64]
Arrays = dict[str, NDArray]
Tensors = Mapping[str, torch.Tensor]

SEEN = 1
IN_ANSWER = 2
FIRST_ROWS = 8
ROWS_AT_ONCE = 32  # bounds the temporaries: some six of [rows, vocabulary] floats


def most_bytes(max_slots: int, vocab_size: int) -> int:
    """What the counts take of the device where every slot is penalised; the pool of pages leaves them so much."""
    return max_slots * vocab_size * torch.int32.itemsize


class DeviceEdits:
    """Rows of counts for the slots that are penalised, as many as are open at once; the first ones make room for more.

    Its methods' arrays go to the device in the step's one copy, and come back as `sent`.
    """

    def __init__(self, slots: Slots, device: torch.device) -> None:
        self._slots, self._vocab = slots, slots.limits.vocab_size
        self._codes = torch.zeros((0, self._vocab), dtype=torch.int32, device=device)
        self._free: list[int] = []
        self._row_of: dict[int, int] = {}  # slot -> row of the counts
        self._counted: dict[int, int] = {}  # slot -> positions that its row has counted

    @property
    def bytes(self) -> int:
        """Of the device's memory."""
        return self._codes.nbytes

    def reset(self) -> None:
        """No slot is open any more; the memory is kept."""
        self._row_of.clear()
        self._counted.clear()
        self._free = list(range(len(self._codes)))

    def seat(self, command: StepCommand) -> Arrays:
        """Take rows for the slots that were opened with penalties and give back those of closed ones.

        To be called once the command has been applied to the slots. Where there is no memory for a row, the slot has
        none: its steps are deferred.
        """
        for slot in column(command.closes).tolist():
            self._leave(slot)
        opened = [(slot, e) for slot in (o.slot for o in command.opens) if (e := self._penalised(slot)) is not None]
        seated = [(slot, edits) for slot, edits in opened if self._take(slot)]
        if not seated:
            return {}
        histories = [edits.history for _, edits in seated if edits.history is not None]
        rows = np.array([self._row_of[slot] for slot, _ in seated], dtype=np.int64)
        self._counted |= {slot: history.known for (slot, _), history in zip(seated, histories, strict=True)}
        places = [row * self._vocab + history.ids for row, history in zip(rows.tolist(), histories, strict=True)]
        codes = [SEEN + IN_ANSWER * history.output_counts.astype(np.int32) for history in histories]
        return {"seat_rows": rows, "seat_places": np.concatenate(places), "seat_codes": np.concatenate(codes)}

    def defers(self, slot: int) -> bool:
        """Whether what is drawn for the slot depends on counts that are not here."""
        edits = self._slots.edits[slot]
        return edits is not None and edits.history is not None and slot not in self._row_of

    def chunks(self, rows: StepRows, starts: Ints) -> Arrays:
        """The tokens of the step's chunks, for those who are penalised for them; `starts` are the rows' positions."""
        places: list[Ints] = []
        adds: list[Ints] = []
        first = rows.num_decode
        for slot, start, tokens in zip(rows.slots[first:].tolist(), starts[first:].tolist(), rows.chunks, strict=True):
            row, edits = self._row_of.get(slot), self._slots.edits[slot]
            if row is None or edits is None:
                continue
            skip = max(self._counted[slot] - start, 0)
            places.append(row * self._vocab + tokens[skip:])
            adds.append(np.where(np.arange(start + skip, start + len(tokens)) >= edits.prompt_length, IN_ANSWER, 0))
            self._counted[slot] = max(self._counted[slot], start + len(tokens))
        if not places:
            return {}
        unique, inverse = np.unique(np.concatenate(places), return_inverse=True)
        sums = np.bincount(inverse, np.concatenate(adds), len(unique))
        return {"chunk_places": unique, "chunk_adds": sums.astype(np.int32)}

    def draws(self, who: Ints, positions: Ints) -> Arrays:
        """What the logits of rows that draw for slots `who` [n] at `positions` [n] go through."""
        edited = np.flatnonzero(self._slots.edited[who]).tolist()
        found = [(row, int(who[row]), int(positions[row])) for row in edited]
        plans = [(row, slot, at, e) for row, slot, at in found if (e := self._slots.edits[slot]) is not None]
        arrays = self._penalties([plan for plan in plans if plan[3].history is not None])
        biased = [(row, e) for row, _, _, e in plans if len(e.bias_ids)]
        if biased:
            arrays["bias_places"] = np.concatenate([row * self._vocab + e.bias_ids for row, e in biased])
            arrays["bias_values"] = np.concatenate([e.bias_values for _, e in biased])
        early = [row * self._vocab + e.stop_ids for row, _, at, e in plans if len(e.stop_ids) and e.forbids_stop(at)]
        if early:
            arrays["stop_places"] = np.concatenate(early)
        return arrays

    def answered(self, who: Ints, positions: Ints, tokens: Ints) -> Arrays:
        """Tokens that the host has drawn for slots `who` [n] at `positions` [n], -1: none."""
        plans = [
            (self._row_of[slot] * self._vocab + token, self._draw(slot, position))
            for slot, position, token in zip(who.tolist(), positions.tolist(), tokens.tolist(), strict=True)
            if token >= 0 and slot in self._row_of
        ]
        if not plans:
            return {}
        places, adds = zip(*plans, strict=True)
        return {"chunk_places": np.array(places, dtype=np.int64), "chunk_adds": np.array(adds, dtype=np.int32)}

    def update(self, sent: Tensors) -> None:
        """Bring the counts up to date by what `seat`, `chunks` or `answered` gave."""
        if "seat_rows" in sent:
            self._codes.index_fill_(0, sent["seat_rows"], 0)
            self._codes.view(-1)[sent["seat_places"]] = sent["seat_codes"]
        if "chunk_places" in sent:
            self._add(sent["chunk_places"], sent["chunk_adds"])

    def apply(self, logits: torch.Tensor, sent: Tensors) -> None:
        """Penalise, bias and forbid in place by what `draws` gave; logits float32 [n, vocab] contiguous."""
        if "penalised_rows" in sent:
            for start in range(0, len(sent["penalised_rows"]), ROWS_AT_ONCE):
                self._penalise(logits, sent, slice(start, start + ROWS_AT_ONCE))
        flat = logits.view(-1)
        if "bias_places" in sent:
            flat.index_put_((sent["bias_places"],), sent["bias_values"], accumulate=True)
        if "stop_places" in sent:
            flat.index_fill_(0, sent["stop_places"], float("-inf"))

    def count(self, tokens: torch.Tensor, sent: Tensors) -> None:
        """Count what was drawn of these logits, int64 [n] with -1 or less for none, where it is.

        Who got none has ended, and its counts do not matter any more.
        """
        if "penalised_rows" in sent:
            drawn = tokens.index_select(0, sent["penalised_rows"]).clamp_(min=0)
            self._add(drawn.add_(sent["count_rows"], alpha=self._vocab), sent["draw_adds"])

    def _penalised(self, slot: int) -> SlotEdits | None:
        edits = self._slots.edits[slot]
        # Of a refused request tokens may be anything, and none is ever drawn.
        return edits if edits is not None and edits.history is not None and slot not in self._slots.refused else None

    def _penalties(self, plans: Sequence[tuple[int, int, int, SlotEdits]]) -> Arrays:
        if not plans:
            return {}
        edits = [e for _, _, _, e in plans]
        return {
            "penalised_rows": np.array([row for row, _, _, _ in plans], dtype=np.int64),
            "count_rows": np.array([self._row_of[slot] for _, slot, _, _ in plans], dtype=np.int64),
            "draw_adds": np.array([self._draw(slot, at) for _, slot, at, _ in plans], dtype=np.int32),
            "repetition": np.array([e.repetition for e in edits], dtype=np.float32),
            "frequency": np.array([e.frequency for e in edits], dtype=np.float32),
            "presence": np.array([e.presence for e in edits], dtype=np.float32),
        }

    def _draw(self, slot: int, position: int) -> int:
        """What a token drawn at `position` adds to its code."""
        edits = self._slots.edits[slot]
        self._counted[slot] = position + 1
        return IN_ANSWER if edits is not None and position >= edits.prompt_length else 0

    def _add(self, places: torch.Tensor, adds: torch.Tensor) -> None:
        """To the codes at `places`, each of which is there once."""
        flat = self._codes.view(-1)
        flat[places] = (flat.index_select(0, places) + adds) | SEEN

    def _penalise(self, logits: torch.Tensor, sent: Tensors, part: slice) -> None:
        rows = sent["penalised_rows"][part]
        codes = self._codes.index_select(0, sent["count_rows"][part])
        counts = (codes >> 1).to(torch.float32)
        repetition, frequency, presence = (sent[n][part, None] for n in ("repetition", "frequency", "presence"))
        raw = logits.index_select(0, rows)
        values = torch.where(raw > 0, raw / repetition, raw * repetition)
        values = values - frequency * counts - presence * (counts > 0)
        logits.index_copy_(0, rows, torch.where(codes > 0, values, raw))

    def _leave(self, slot: int) -> None:
        row = self._row_of.pop(slot, None)
        if row is not None:
            self._counted.pop(slot, None)
            self._free.append(row)

    def _take(self, slot: int) -> bool:
        """Whether there is a row for the slot."""
        if not self._free and not self._grow():
            return False
        self._row_of[slot] = self._free.pop()
        return True

    def _grow(self) -> bool:
        had = len(self._codes)
        wanted = min(max(FIRST_ROWS, 2 * had), self._slots.limits.max_slots)
        try:
            codes = torch.zeros((wanted, self._vocab), dtype=torch.int32, device=self._codes.device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            log.warning("no memory to count tokens on the device: steps with penalties wait for results", rows=wanted)
            return False
        codes[:had] = self._codes
        self._codes = codes
        self._free += range(had, wanted)
        log.info("counting tokens of penalised requests", rows=wanted, mib=self.bytes // MIB)
        return True
