"""Runs a story through an engine in two halves, as eagerly as a test says."""

from __future__ import annotations

import random
from collections import Counter, deque

import msgspec

from services.gpu_worker.cuda.device import HostDevice
from services.gpu_worker.cuda.engine import PipelinedEngine
from services.gpu_worker.cuda.launched import Launched
from services.gpu_worker.pipeline import DEPTH
from shared.messages.step import StepResult
from tests.gpu_worker.step_stories import Story, toy_engine


def without_times(result: StepResult) -> StepResult:
    return msgspec.structs.replace(result, forward_ms=0.0, mask_wait_ms=0.0, queue_ms=0.0)


class Player:
    """Runs a story through a pipelined engine, launching ahead as often as `eagerness` says."""

    def __init__(self, story: Story, eagerness: float, seed: int = 0, engine: PipelinedEngine | None = None) -> None:
        self.engine = engine or PipelinedEngine(toy_engine(), HostDevice())
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
