"""Ranks in two halves: each runs the rows and the tokens that rank 0 runs, whatever is under way meanwhile."""

from __future__ import annotations

from collections import Counter, deque
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.batch import ForwardBatch
from services.gpu_worker.cuda.device import HostDevice
from services.gpu_worker.cuda.edits import DeviceEdits
from services.gpu_worker.cuda.engine import PipelinedEngine
from services.gpu_worker.cuda.following import FollowingEngine
from services.gpu_worker.cuda.launched import Launched
from services.gpu_worker.engine import Engine, MaskSource
from services.gpu_worker.faults import ProtocolError
from services.gpu_worker.parallel.follower import obey
from services.gpu_worker.parallel.group import GroupBroken, TensorGroup
from services.gpu_worker.parallel.leader import LeadingPipeline
from services.gpu_worker.parallel.messages import LaunchStep, decoder
from shared.ints import pack
from shared.messages.step import StepCommand, StepResult
from tests.gpu_worker.step_player import Player, without_times
from tests.gpu_worker.step_stories import Story, Writer, toy_engine
from tests.gpu_worker.test_cuda_engine import same_slots
from tests.gpu_worker.toy_engine import ToyRunner


class Wire:
    """What rank 0 says and shares, as a TensorGroup of it."""

    def __init__(self) -> None:
        self.words: deque[bytes] = deque()
        self.tokens: deque[torch.Tensor] = deque()

    def broadcast(self, data: bytes = b"") -> bytes:
        self.words.append(data)
        return data

    def share(self, x: torch.Tensor) -> None:
        self.tokens.append(x.clone())


class Ear:
    """The same wire as a TensorGroup of another rank."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def share(self, x: torch.Tensor) -> None:
        x.copy_(self._wire.tokens.popleft())


class TwoRanks(LeadingPipeline):
    """Rank 0, and rank 1 that hears of everything at the end of each call, as late as it ever may."""

    def __init__(self) -> None:
        self.wire, self.first, self.second = Wire(), toy_engine(), toy_engine()
        super().__init__(self.first, HostDevice(), cast(TensorGroup, self.wire))
        self.following = FollowingEngine(self.second, HostDevice(), cast(TensorGroup, Ear(self.wire)))

    def launch(self, command: StepCommand) -> Launched:
        step = super().launch(command)
        self.hear()
        return step

    def complete(self, step: Launched, masks: MaskSource, incarnation: int, queue_ms: float = 0.0) -> StepResult:
        result = super().complete(step, masks, incarnation, queue_ms)
        self.hear()
        return result

    def hear(self) -> None:
        while self.wire.words:
            obey(self.wire.words.popleft(), self.second, self.following)
        assert not self.wire.tokens
        same_slots(self.second.slots, self.first.slots)
        mine, theirs = batches(self.second), batches(self.first)
        assert len(mine) == len(theirs)
        if mine:
            for name in ("token_ids", "positions", "qo_indptr", "kv_slots", "logit_rows"):
                assert torch.equal(getattr(mine[-1], name), getattr(theirs[-1], name)), name


def runner_of(engine: Engine) -> ToyRunner:
    assert isinstance(engine.runner, ToyRunner)
    return engine.runner


def batches(engine: Engine) -> list[ForwardBatch]:
    return runner_of(engine).batches


def play(story: Story, eagerness: float, seed: int, ranks: TwoRanks) -> Counter[str]:
    player = Player(story, eagerness, seed, cast(PipelinedEngine, ranks))
    for ours, theirs in zip(player.play(), story.results, strict=True):
        assert without_times(ours) == without_times(theirs)
    return player.events


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.5, 0.9, 1.0]), st.integers(4, 25), st.sampled_from([1, 2]))
def test_the_second_rank_does_what_the_first_does(seed: int, eagerness: float, steps: int, ahead: int) -> None:
    play(Writer(seed, ahead=ahead).write(steps), eagerness, seed, TwoRanks())


def test_stories_reach_what_they_are_for() -> None:
    seen: Counter[str] = Counter()
    for seed in range(10):
        seen += play(Writer(seed).write(25), 1.0, seed, TwoRanks())
    assert min(seen[name] for name in ("ahead", "deferred", "skipped")) >= 5


def test_what_rank_0_has_no_memory_for_is_deferred_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceEdits, "_grow", lambda _: False)
    seen: Counter[str] = Counter()
    for seed in range(3):
        seen += play(Writer(seed, features={"edits"}).write(20), 1.0, seed, TwoRanks())
    assert seen["deferred"] > 5


def test_a_reset_forgets_what_is_under_way_on_every_rank() -> None:
    story, ranks = Writer(1).write(10), TwoRanks()
    ranks.launch(story.commands[0])
    ranks.reset()
    ranks.hear()
    assert not ranks.second.slots.is_open.any()
    play(story, 1.0, 1, ranks)


def test_a_command_that_is_none_reaches_no_other_rank() -> None:
    ranks = TwoRanks()
    with pytest.raises(ProtocolError):
        ranks.launch(StepCommand(step_id=0, epoch=1, decode_slots=pack([0])))
    assert not ranks.wire.words


def test_a_model_that_fails_within_a_step_breaks_the_group() -> None:
    story, ranks = Writer(1).write(3), TwoRanks()
    runner_of(ranks.first).error = RuntimeError("boom")
    with pytest.raises(GroupBroken, match="boom"):
        for command in story.commands:
            ranks.launch(command)
    assert type(decoder.decode(ranks.wire.words[-1])) is LaunchStep
