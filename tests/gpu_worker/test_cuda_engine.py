"""The engine in two halves answers what the engine of the host does, whatever is under way meanwhile."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gpu_worker.step_player import Player, without_times
from tests.gpu_worker.step_stories import SLOTS, Writer


def same_slots(one: Any, other: Any) -> None:
    """What of two engines' slots later steps depend on."""
    for slot in range(SLOTS):
        assert one.is_open[slot] == other.is_open[slot]
        if not one.is_open[slot]:
            continue
        for name in ("ended", "lagging", "computed", "page_counts", "remaining"):
            assert getattr(one, name)[slot] == getattr(other, name)[slot], (slot, name)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 0.9, 1.0]), st.integers(4, 25), st.sampled_from([1, 2]))
def test_two_halves_are_the_whole(seed: int, eagerness: float, steps: int, ahead: int) -> None:
    writer = Writer(seed, ahead=ahead)
    story = writer.write(steps)
    player = Player(story, eagerness, seed)
    for ours, theirs in zip(player.play(), story.results, strict=True):
        assert without_times(ours) == without_times(theirs)
    same_slots(player.engine.slots, writer.engine.slots)


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
