"""The engine in two halves answers what the engine of the host does, whatever is under way meanwhile."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.cuda.device import HostDevice
from services.gpu_worker.cuda.engine import PipelinedEngine
from services.gpu_worker.cuda.launched import Launched
from services.gpu_worker.engine import Engine
from services.gpu_worker.pipeline import DEPTH
from shared.messages.step import StepResult
from tests.gpu_worker.step_stories import BROKEN, CONTEXT, PAGES_EACH, SLOTS, Story, Writer
from tests.gpu_worker.toy_engine import CPU, Bench


def without_times(result: StepResult) -> StepResult:
    return msgspec.structs.replace(result, forward_ms=0.0, mask_wait_ms=0.0, queue_ms=0.0)


class Player:
    """Runs a story through a pipelined engine, launching ahead as often as `eagerness` says."""

    def __init__(self, story: Story, eagerness: float, seed: int = 0) -> None:
        bench = Bench(SLOTS, SLOTS * PAGES_EACH, CONTEXT, 64)
        bench.runner.broken_tokens = {BROKEN}
        self.engine = PipelinedEngine(Engine(bench.runner, bench.limits, 64, CPU), HostDevice())
        self._story = story
        self._eagerness = eagerness
        self._random = random.Random(seed)
        self._flight: deque[Launched] = deque()
        self.results: list[StepResult] = []
        self.events: Counter[str] = Counter()

    def play(self) -> list[StepResult]:
        for command in self._story.commands:
            while len(self._flight) >= DEPTH or self.engine.must_complete_before(command):
                self._complete()
            if self._flight:
                self.events["ahead"] += 1
            self._flight.append(self.engine.launch(command))
            self.events["deferred"] += self._flight[-1].deferred
            while self._flight and self._random.random() > self._eagerness:
                self._complete()
        while self._flight:
            self._complete()
        return self.results

    def _complete(self) -> None:
        step = self._flight.popleft()
        self.results.append(self.engine.complete(step, self._story.masks.__getitem__, incarnation=7))
        self.events["skipped"] += sum(len(later.skipped) for later in self._flight)


def same_slots(one: Any, other: Any) -> None:
    """What of two engines' slots later steps depend on."""
    for slot in range(SLOTS):
        assert one.is_open[slot] == other.is_open[slot]
        if not one.is_open[slot]:
            continue
        for name in ("ended", "lagging", "computed", "page_counts", "remaining"):
            assert getattr(one, name)[slot] == getattr(other, name)[slot], (slot, name)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 0.9, 1.0]))
def test_two_halves_are_the_whole(seed: int, eagerness: float) -> None:
    writer = Writer(seed)
    story = writer.write(25)
    player = Player(story, eagerness, seed)
    for ours, theirs in zip(player.play(), story.results, strict=True):
        assert without_times(ours) == without_times(theirs)
    same_slots(player.engine.slots, writer._bench.engine.slots)


def test_stories_reach_what_they_are_for() -> None:
    seen: Counter[str] = Counter()
    for seed in range(20):
        story = Writer(seed).write(25)
        player = Player(story, 1.0, seed)
        player.play()
        seen += player.events
        seen["errors"] += sum(len(result.errors) for result in story.results)
        seen["copies"] += sum(bool(command.page_copies) for command in story.commands)
        seen["masked"] += sum(bool(command.masked_slots) for command in story.commands)
        seen["scores"] += sum(len(result.scores) + len(result.prompt_scores) for result in story.results)
    assert min(seen[name] for name in ("ahead", "deferred", "skipped", "errors", "copies", "masked", "scores")) >= 10


def test_a_reset_forgets_what_is_under_way() -> None:
    story = Writer(1).write(10)
    player = Player(story, 1.0)
    engine = player.engine
    engine.launch(story.commands[0])
    engine.reset()
    assert not engine.slots.is_open.any()
    assert [without_times(result) for result in player.play()] == [without_times(result) for result in story.results]
