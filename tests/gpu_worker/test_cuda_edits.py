"""Penalties, biases and forbidden stops on the device: the logits of the host's to the last bit, and nothing waits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.cuda import edits as device_edits
from services.gpu_worker.cuda.device import HostDevice
from services.gpu_worker.cuda.edits import FIRST_ROWS, DeviceEdits, most_bytes
from services.gpu_worker.cuda.engine import PipelinedEngine
from services.gpu_worker.cuda.staging import Staging
from services.gpu_worker.engine import Engine, extend_histories
from services.gpu_worker.logit_edits import RowEdit, apply_edits
from services.gpu_worker.rows import StepRows
from services.gpu_worker.sampling import extend_answers
from services.gpu_worker.slots import SlotLimits, Slots
from shared.ints import pack
from shared.messages.request import SamplingParams
from shared.messages.step import StepCommand
from tests.gpu_worker.step_player import Player, without_times
from tests.gpu_worker.step_stories import Writer
from tests.gpu_worker.toy_engine import CPU, Steps, ToyRunner, greedy, open_slot, prefill, tokens

VOCAB, SLOTS = 50, 20
LIMITS = SlotLimits(SLOTS, 64, 4, 64, VOCAB)


def params(rng: random.Random) -> SamplingParams:
    bias = [rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 4]))]
    return SamplingParams(
        repetition_penalty=rng.choice([1.0, 1.37, 0.8]),
        frequency_penalty=rng.choice([0.0, 0.31, -0.7]),
        presence_penalty=rng.choice([0.0, 0.9]),
        min_new_tokens=rng.choice([0, 3]),
        stop_token_ids=tuple(rng.sample(range(VOCAB + 9), rng.choice([0, 3]))),
        logit_bias_ids=pack(bias),
        logit_bias_values=np.array([rng.uniform(-9, 9) for _ in bias], dtype="<f4").tobytes(),
    )


class Life:
    """Slots that open, read chunks, draw tokens and close, counted on both sides."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.slots = Slots(LIMITS)
        self.edits = DeviceEdits(self.slots, CPU)
        self.staging = Staging(HostDevice())

    def send(self, arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
        sent = self.staging.send(arrays)
        self.edits.update(sent)
        return sent

    def step(self, number: int) -> None:
        rng, slots = self.rng, self.slots
        open_now = np.flatnonzero(slots.is_open).tolist()
        closes = [slot for slot in open_now if slots.ended[slot] or rng.random() < 0.1]
        free = [slot for slot in range(SLOTS) if slot not in open_now or slot in closes]
        opens = []
        for slot in free:
            if rng.random() < 0.4:
                known = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 6))]
                opens.append(open_slot(slot, rng.randint(1, 9), [0, 1], params(rng), len(known), known))
        command = StepCommand(step_id=number, epoch=1, closes=pack(closes), opens=tuple(opens))
        slots.apply(command)
        arrays = self.edits.seat(command)
        running = np.flatnonzero(slots.is_open & ~slots.ended).tolist()
        who = rng.sample(running, k=min(6, len(running)))
        who.sort(key=lambda slot: slots.last_token[slot] >= 0)  # who has drawn nothing yet has to read
        reading = who[: rng.randint(sum(slots.last_token[slot] < 0 for slot in who), len(who))]
        chunks = [self._chunk(slot) for slot in reading]
        rows = StepRows(
            np.array(reading, dtype=np.int64), np.array([len(c) for c in chunks], dtype=np.int64), 0, chunks
        )
        starts = slots.computed[rows.slots]
        arrays |= self.edits.chunks(rows, starts)
        slots.computed[rows.slots] += rows.lengths
        slots.computed[who[len(reading) :]] += 1
        extend_histories(rows, starts, slots)
        self._draw(np.array(who, dtype=np.int64), arrays)

    def _chunk(self, slot: int) -> np.ndarray:
        """Some tokens; the last one drawn is the first of them, where there is one."""
        last = int(self.slots.last_token[slot])
        return np.array([*([last] if last >= 0 else []), 7, *self.rng.choices(range(VOCAB), k=4)], dtype=np.int64)

    def _draw(self, who: np.ndarray, arrays: dict[str, Any]) -> None:
        rng, slots = self.rng, self.slots
        positions = slots.computed[who]
        logits = torch.from_numpy(np.random.default_rng(rng.randrange(99)).standard_normal((len(who), VOCAB)) * 3)
        logits = logits.float()
        logits[:, rng.randrange(VOCAB)] = float("-inf")
        logits[:, rng.randrange(VOCAB)] = -0.0
        mine, theirs = logits.clone(), logits
        plans = [
            RowEdit(row, int(positions[row]), slots.edits[slot])
            for row, slot in enumerate(who.tolist())
            if slots.edits[slot] is not None
        ]
        apply_edits(theirs, plans)
        drawn = torch.tensor([rng.randrange(-2, VOCAB) for _ in who], dtype=torch.int64)
        if rng.random() < 0.7:
            sent = self.send(arrays | self.edits.draws(who, positions))
            self.edits.apply(mine, sent)
            assert torch.equal(mine, theirs)
            self.edits.count(drawn, sent)
        else:  # a deferred step: the host draws
            self.send(arrays)
            self.send(self.edits.answered(who, positions, drawn.numpy()))
        extend_answers(who, positions, drawn.numpy(), slots)
        slots.last_token[who] = drawn.numpy()
        slots.ended[who] |= drawn.numpy() < 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_logits_are_those_of_the_host(seed: int) -> None:
    life = Life(seed)
    for number in range(25):
        life.step(number)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 2]))
def test_steps_with_edits_are_not_deferred(seed: int, ahead: int) -> None:
    story = Writer(seed, ahead=ahead, features={"edits", "filters", "aborts"}).write(25)
    player = Player(story, 1.0, seed)
    for ours, theirs in zip(player.play(), story.results, strict=True):
        assert without_times(ours) == without_times(theirs)
    assert not player.events["deferred"]


def penalised_stories(engine: PipelinedEngine, answers: int) -> list[list[int]]:
    """Greedy answers of requests under way together, each with penalties."""
    steps = Steps(engine)
    opened = [open_slot(s, 3, [4 * s, 4 * s + 1, 4 * s + 2], greedy(repetition_penalty=1.8)) for s in range(answers)]
    rows = tuple(prefill(s, [s, 2 * s, 9]) for s in range(answers))
    out = [tokens(steps.step(opens=tuple(opened), prefills=rows))]
    return out + [tokens(steps.step(list(range(answers)))) for _ in range(6)]


def engines(slots: int) -> tuple[Engine, PipelinedEngine]:
    def make() -> Engine:
        return Engine(ToyRunner(64), SlotLimits(slots, 64, 4, 64, 100), 64, CPU)

    return make(), PipelinedEngine(make(), HostDevice())


def test_there_is_room_for_as_many_as_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_edits, "ROWS_AT_ONCE", 3)
    plain, halves = engines(FIRST_ROWS + 3)
    assert halves._edits.bytes == 0
    expected = penalised_stories(plain, FIRST_ROWS + 2)  # type: ignore[arg-type]
    assert penalised_stories(halves, FIRST_ROWS + 2) == expected
    assert halves._edits.bytes == most_bytes(FIRST_ROWS + 3, 100)
    halves.reset()
    assert penalised_stories(halves, 2) == penalised_stories(engines(2)[0], 2)  # type: ignore[arg-type]


def test_without_memory_for_counts_steps_are_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    plain, halves = engines(4)
    expected = penalised_stories(plain, 3)  # type: ignore[arg-type]
    monkeypatch.setattr("services.gpu_worker.cuda.edits.torch.zeros", full)
    assert penalised_stories(halves, 3) == expected
    assert halves._edits.bytes == 0
