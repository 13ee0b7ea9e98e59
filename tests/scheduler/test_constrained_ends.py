"""How constrained requests end: complete, cut by the budget, or at a stop token."""

from __future__ import annotations

import pytest

from shared.messages.request import Constraint
from shared.messages.stream import FinishReason
from tests.local_fleet import tokens
from tests.scheduler.guided_kit import guided_fleet, obey
from tests.scheduler.test_constrained_requests import DATE, LONG, PERSON, check, submit

pytestmark = pytest.mark.usefixtures("pace")


@pytest.mark.parametrize(("budget", "reason"), [(3, FinishReason.LENGTH), (200, FinishReason.STOP)])
def test_the_end_of_the_budget(budget: int, reason: FinishReason) -> None:
    fleet, _, _ = guided_fleet()
    rid = submit(fleet, tokens(20), LONG, budget)
    fleet.run()
    check(fleet, rid, LONG)
    assert fleet.stream(rid).finish.reason is reason


def test_a_text_that_is_complete_with_its_last_token_has_stopped() -> None:
    wanted = len(obey(tokens(20), DATE, 100))
    fleet, _, _ = guided_fleet()
    rid = submit(fleet, tokens(20), DATE, wanted)
    short = submit(fleet, tokens(20), DATE, wanted - 1)
    fleet.run()
    assert fleet.stream(rid).finish.reason is FinishReason.STOP
    assert fleet.stream(short).finish.reason is FinishReason.LENGTH
    assert len(fleet.stream(short).tokens) == wanted - 1


@pytest.mark.parametrize(("insists", "reason"), [(False, FinishReason.LENGTH), (True, FinishReason.STOP)])
def test_free_text_beside_tags_was_cut_at_the_budget(insists: bool, reason: FinishReason) -> None:
    source = '{"structures":[{"begin":"<f>","schema":{},"end":"</f>"}],"triggers":["<f>"]}'
    constraint = Constraint("structural_tag", source, complete_within_budget=True, refuse_small_budget=insists)
    fleet, _, _ = guided_fleet()
    rid = submit(fleet, tokens(20), constraint, 6)
    fleet.run()
    assert len(fleet.stream(rid).tokens) == 6
    assert fleet.stream(rid).finish.reason is reason


def test_a_stop_token_among_forced_ones_ends_there() -> None:
    answer = obey(tokens(20), PERSON, 60)
    fleet, _, _ = guided_fleet()
    stop = answer[2]
    rid = fleet.submit(tokens(20), 60, constraint=PERSON, stop_token_ids=(stop,))
    fleet.run()
    assert fleet.stream(rid).tokens == answer[: answer.index(stop) + 1]
    assert fleet.stream(rid).finish.matched_token == stop
