"""Random but valid sequences of commands, as a scheduler with one or two steps of run-ahead would send them.

Command t is made without the results of the last steps: so rows of slots that have ended in them are in it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from services.gpu_worker.engine import Engine
from services.gpu_worker.slots import SlotLimits
from shared.ints import pack
from shared.messages.request import SamplingParams
from shared.messages.step import PrefillRow, SlotOpen, StepCommand, StepResult
from tests.gpu_worker.toy_engine import CPU, PAGE, VOCAB, ToyRunner, open_slot, prefill, tokens

SLOTS = 4
PAGES_EACH = 16
CONTEXT = PAGE * PAGES_EACH
MAX_TOKENS = 64
LIMITS = SlotLimits(SLOTS, SLOTS * PAGES_EACH, PAGE, CONTEXT, VOCAB)
BROKEN = 13  # whoever ends in it has logits that are not finite


def toy_engine() -> Engine:
    """One piece, whatever the switch of `cuda.start` says."""
    runner = ToyRunner(SLOTS * PAGES_EACH)
    runner.broken_tokens = {BROKEN}
    return Engine(runner, LIMITS, MAX_TOKENS, CPU)


@dataclass
class Seat:
    """What the scheduler knows of one slot."""

    prompt: list[int]
    remaining: int
    fed: int = 0  # tokens whose rows were sent
    pages: int = 0
    sent_samples: int = 0
    last_known: int = -1  # the newest token, where no row is under way
    in_flight: int = 0
    over: bool = False
    forced: list[int] = field(default_factory=list)

    @property
    def is_decoding(self) -> bool:
        return self.fed >= len(self.prompt)


@dataclass
class Story:
    """Commands with their masks, and what the engine of the host answers."""

    commands: list[StepCommand]
    masks: dict[int, tuple[bytes, bytes]]
    results: list[StepResult]


class Writer:
    """Plays the scheduler against a host engine, by default one over the toy model.

    ahead: steps that are sent before a result is heard. features: None draws some.
    """

    def __init__(
        self, seed: int, engine: Engine | None = None, ahead: int = 1, features: set[str] | None = None
    ) -> None:
        self._random = random.Random(seed)
        self.engine = engine or toy_engine()
        self._vocab = self.engine.slots.limits.vocab_size
        self._masks: dict[int, tuple[bytes, bytes]] = {}
        self._ahead = ahead
        self._seats: list[Seat | None] = [None] * SLOTS
        self._awaited: list[tuple[list[tuple[int, Seat]], StepResult]] = []
        some = {f for f in ("edits", "masks", "scores", "filters", "aborts") if self._random.random() < 0.6}
        self._features = some if features is None else features

    def write(self, steps: int) -> Story:
        story = Story([], self._masks, [])
        for step in range(steps):
            command, outputs = self._command(step)
            result = self.engine.execute(command, self._masks.__getitem__, incarnation=7)
            story.commands.append(command)
            story.results.append(result)
            self._awaited.append((outputs, result))
            if len(self._awaited) > self._ahead:
                self._hear(*self._awaited.pop(0))
        return story

    def _hear(self, outputs: list[tuple[int, Seat]], result: StepResult) -> None:
        failed = {error.slot for error in result.errors}
        for (slot, seat), token in zip(outputs, tokens(result), strict=True):
            seat.in_flight -= 1
            seat.last_known = token
            params_over = token < 0 or slot in failed or token in self._stops(slot, seat)
            seat.over = seat.over or params_over

    def _stops(self, slot: int, seat: Seat) -> frozenset[int]:
        return self.engine.slots.stops[slot] if self._seats[slot] is seat else frozenset()

    def _command(self, step: int) -> tuple[StepCommand, list[tuple[int, Seat]]]:
        rng = self._random
        closes: list[int] = []
        opens: list[SlotOpen] = []
        copies: list[int] = []
        for slot, seat in enumerate(self._seats):
            done = seat is not None and (seat.over or seat.sent_samples >= seat.remaining) and not seat.in_flight
            aborted = seat is not None and "aborts" in self._features and rng.random() < 0.05
            if seat is not None and (done or aborted):
                closes.append(slot)
                self._seats[slot] = None
            if self._seats[slot] is None and rng.random() < 0.6:
                opens.append(self._open(slot, copies))
        decode, rows, appended = self._rows()
        outputs = [(slot, self._seat(slot)) for slot in decode]
        outputs += [(row.slot, self._seat(row.slot)) for row in rows if row.sample]
        masked = self._mask(step, [slot for slot, _ in outputs])
        command = StepCommand(
            step_id=step,
            epoch=1,
            decode_slots=pack(decode),
            prefills=tuple(rows),
            masked_slots=pack(masked),
            opens=tuple(opens),
            closes=pack(closes),
            page_slots=pack([slot for slot, _ in appended]),
            page_ids=pack([page for _, page in appended]),
            page_copies=pack(copies),
        )
        for _, seat in outputs:
            seat.in_flight += 1
            seat.sent_samples += 1
        return command, outputs

    def _seat(self, slot: int) -> Seat:
        seat = self._seats[slot]
        assert seat is not None
        return seat

    def _open(self, slot: int, copies: list[int]) -> SlotOpen:
        rng = self._random
        prompt = [rng.randrange(self._vocab) for _ in range(rng.randint(1, 14))]
        seat = Seat(prompt, rng.choice([1, 2, 3, 8, 30]))
        first = slot * PAGES_EACH
        computed = 0
        source = rng.randrange(SLOTS)
        other = self._seats[source]
        # Only what is known to lie there is copied: beyond an answer's end a page holds whatever was tried.
        known = other is not None and source != slot and min(other.fed, len(other.prompt)) >= PAGE < len(prompt)
        free = source * PAGES_EACH not in copies[1::2] and first not in copies[0::2]
        if other is not None and known and free and rng.random() < 0.5:
            computed = rng.randint(1, PAGE)
            prompt[:computed] = other.prompt[:computed]
            copies += [source * PAGES_EACH, first]
        seat.fed = computed
        seat.pages = rng.randint(1 if computed else 0, 3)
        self._seats[slot] = seat
        history = prompt[:computed]
        params = self._params()
        return open_slot(
            slot, len(prompt), [first + i for i in range(seat.pages)], params, computed, history, seat.remaining
        )

    def _params(self) -> SamplingParams:
        rng, on = self._random, self._features
        fields: dict[str, object] = {"stop_token_ids": tuple(rng.sample(range(self._vocab), rng.choice([0, 10, 40])))}
        if rng.random() < 0.7:
            fields |= {"temperature": rng.choice([0.5, 1.0, 2.0]), "seed": rng.randrange(2**63)}
            if "filters" in on:
                fields |= {
                    "top_k": rng.choice([0, 0, 1, 5, 70]),
                    "top_p": rng.choice([1.0, 0.9, 0.5, 0.1]),
                    "min_p": rng.choice([0.0, 0.0, 0.05, 1.0]),
                }
        else:
            fields["temperature"] = 0.0
        if "edits" in on and rng.random() < 0.4:
            fields |= {"repetition_penalty": 1.4, "frequency_penalty": 0.5} if rng.random() < 0.5 else {}
            fields["presence_penalty"] = rng.choice([0.0, 1.5])
            fields["min_new_tokens"] = rng.choice([0, 3])
            if rng.random() < 0.3:
                ids = [rng.randrange(self._vocab) for _ in range(3)]
                values = np.array([rng.uniform(-3, 6) for _ in ids], dtype="<f4")
                fields |= {"logit_bias_ids": pack(ids), "logit_bias_values": values.tobytes()}
        if "scores" in on and rng.random() < 0.3:
            fields |= {"logprobs": 2, "prompt_logprobs_from": 0}
        return SamplingParams(**fields)  # type: ignore[arg-type]

    def _rows(self) -> tuple[list[int], list[PrefillRow], list[tuple[int, int]]]:
        rng = self._random
        decode: list[int] = []
        rows: list[PrefillRow] = []
        appended: list[tuple[int, int]] = []
        for slot in rng.sample(range(SLOTS), SLOTS):
            seat = self._seats[slot]
            if seat is None or seat.over or seat.sent_samples >= seat.remaining or rng.random() < 0.1:
                continue
            count = self._row(slot, seat, decode, rows)
            seat.fed += count
            while seat.pages * PAGE < seat.fed and seat.pages < PAGES_EACH:
                appended.append((slot, slot * PAGES_EACH + seat.pages))
                seat.pages += 1
        return decode, rows, appended

    def _row(self, slot: int, seat: Seat, decode: list[int], rows: list[PrefillRow]) -> int:
        rng = self._random
        if not seat.is_decoding:
            rest = seat.prompt[seat.fed :]
            count = rng.randint(1, len(rest))
            last = count == len(rest)
            slots = self.engine.slots
            scored = slots.is_open[slot] and slots.scored[slot] and seat.fed == 0
            following = -1 if last else rest[count]
            rows.append(
                prefill(slot, rest[:count], last, **({"score_from": 0, "next_token": following} if scored else {}))
            )
            return count
        if seat.fed + 4 > CONTEXT:
            seat.remaining = seat.sent_samples
            return 0
        if not seat.in_flight and seat.last_known >= 0 and rng.random() < 0.2:
            rows.append(prefill(slot, [seat.last_known, rng.randrange(self._vocab), rng.randrange(self._vocab)]))
            return 3
        if seat.forced:
            rows.append(prefill(slot, [*seat.forced, rng.randrange(self._vocab)]))
            seat.forced = []
            return 2
        decode.append(slot)
        return 1

    def _mask(self, step: int, sampling: list[int]) -> list[int]:
        rng = self._random
        if "masks" not in self._features or rng.random() < 0.5:
            return []
        masked = [slot for slot in sampling if rng.random() < 0.6]
        words = np.zeros((len(masked), -(-self._vocab // 32)), dtype="<u4")
        for row, slot in enumerate(masked):
            allowed = rng.sample(range(self._vocab), rng.choice([0, 1, 1, 30, 90]))
            for token in allowed:
                words[row, token // 32] |= np.uint32(1 << (token % 32))
            if len(allowed) == 1:
                self._seat(slot).forced = allowed  # the next row of the slot knows what this one yields
        if masked:
            self._masks[step] = (pack(masked), words.tobytes())
        return masked
