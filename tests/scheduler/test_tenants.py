"""Budgets of tenants, what they are told of their use, and aborts by name across frontends."""

from __future__ import annotations

import stat
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.tenants import Bucket
from shared import ints
from shared.messages.request import AbortRequest, Operation, RequestRejected, TenantUsage
from shared.messages.stream import FinishReason
from tests.fake_model import generate
from tests.local_fleet import LocalFleet, tokens


def key_file(tmp_path: Path, *lines: str) -> str:
    path = tmp_path / "keys"
    path.write_text("\n".join(lines))
    path.chmod(stat.S_IRUSR | stat.S_IWUSR)
    return str(path)


def refused(fleet: LocalFleet, rid: str) -> RequestRejected | None:
    fleet.turn()
    return fleet.tokenizer.rejected.get(rid)


def usage(fleet: LocalFleet, name: str) -> TenantUsage:
    return next(tenant for tenant in fleet.core.board.build().tenants if tenant.name == name)


def test_requests_a_minute(tmp_path: Path) -> None:
    fleet = LocalFleet(api_key_file=key_file(tmp_path, "alice k1 3", "bob k2"))
    for index in range(3):
        assert refused(fleet, fleet.submit(tokens(5), 1, rid=f"a{index}", tenant="alice")) is None
    late = refused(fleet, fleet.submit(tokens(5), 1, rid="a3", tenant="alice"))
    assert late is not None
    assert (late.code, late.retry_after_s) == ("rate_limited", 20.0)
    assert "3 requests a minute" in late.detail
    assert refused(fleet, fleet.submit(tokens(5), 1, rid="b0", tenant="bob")) is None
    fleet.clock.advance(19.0)
    assert refused(fleet, fleet.submit(tokens(5), 1, rid="a4", tenant="alice")) is not None
    fleet.clock.advance(1.5)
    assert refused(fleet, fleet.submit(tokens(5), 1, rid="a5", tenant="alice")) is None
    assert refused(fleet, fleet.submit(tokens(5), 1, rid="a6", tenant="alice")) is not None
    assert usage(fleet, "alice").rejected == 3


def test_choices_of_one_request_count_once(tmp_path: Path) -> None:
    fleet = LocalFleet(api_key_file=key_file(tmp_path, "alice k1 1"))
    rids = [
        fleet.submit(tokens(5), 2, rid=f"c{index}", tenant="alice", counted=index == 0, choice_index=index)
        for index in range(4)
    ]
    fleet.run()
    fleet.assert_answered(*rids)
    used = usage(fleet, "alice")
    assert (used.requests, used.prompt_tokens, used.output_tokens, used.live) == (1, 5, 8, 0)


def test_what_belongs_to_a_refused_request_is_refused_with_it(tmp_path: Path) -> None:
    fleet = LocalFleet(api_key_file=key_file(tmp_path, "alice k1 1"))

    def send(name: str) -> list[bool]:
        rids = [
            fleet.submit(tokens(5), 2, rid=f"{name}.{i}", tenant="alice", counted=i == 0, names=(f"{i}", name))
            for i in range(3)
        ]
        return [refused(fleet, rid) is not None for rid in rids]

    assert send("first") == [False] * 3
    assert send("second") == [True] * 3
    fleet.clock.advance(60)
    assert send("third") == [False] * 3
    assert usage(fleet, "alice").rejected == 1


def test_tokens_a_minute_are_paid_for_when_they_are_known(tmp_path: Path) -> None:
    fleet = LocalFleet(api_key_file=key_file(tmp_path, "alice k1 - 60"))
    rid = fleet.submit(tokens(50), 30, rid="first", tenant="alice")
    fleet.run()
    fleet.assert_answered(rid)
    late = refused(fleet, fleet.submit(tokens(5), 1, rid="second", tenant="alice"))
    assert late is not None
    assert late.retry_after_s == 21.0  # 80 tokens of 60 used, one a second comes back
    fleet.clock.advance(21.0)
    assert refused(fleet, fleet.submit(tokens(5), 1, rid="third", tenant="alice")) is None


def test_a_resumed_request_is_never_refused(tmp_path: Path) -> None:
    fleet = LocalFleet(api_key_file=key_file(tmp_path, "alice k1 1"))
    fleet.submit(tokens(5), 1, rid="a", tenant="alice")
    assert refused(fleet, fleet.submit(tokens(5), 1, rid="b", tenant="alice")) is not None
    known = generate(tokens(5), 8, (), 0)[:2]
    assert refused(fleet, fleet.submit(tokens(5), 8, rid="c", tenant="alice", output_ids=ints.pack(known))) is None


def test_who_has_no_tenant_has_no_budget() -> None:
    fleet = LocalFleet()
    rid = fleet.submit(tokens(5), 2)
    fleet.run()
    fleet.assert_answered(rid)
    assert fleet.core.board.build().tenants == ()


def test_a_name_reaches_requests_of_every_frontend() -> None:
    fleet = LocalFleet()
    other = fleet.add_tokenizer("u/1")
    mine = fleet.submit(tokens(20), 50, rid="x.0", tokenizer=other, names=("x",), tenant="alice")
    also = fleet.submit(tokens(21), 50, rid="x.1", tokenizer=other, names=("x",), tenant="alice")
    theirs = fleet.submit(tokens(22), 5, rid="bob:x", tokenizer=other, names=("x",), tenant="bob")
    longer = fleet.submit(tokens(23), 5, rid="x1", names=("x1",), tenant="alice")
    fleet.turn()
    fleet.from_tokenizer(AbortRequest((), names=("x", "unknown"), tenant="alice"))
    fleet.run()
    for rid in (mine, also):
        finish = fleet.stream(rid).finish
        assert finish is not None
        assert finish.reason is FinishReason.ABORT
    fleet.assert_answered(theirs, longer)
    assert len(fleet.core.names) == 0
    fleet.submit(tokens(24), 50, rid="bob:y", names=("y",), tenant="bob")
    fleet.turn()
    fleet.from_tokenizer(AbortRequest((), names=("y",)))  # an operator: anybody's
    fleet.run()
    finish = fleet.stream("bob:y").finish
    assert finish is not None
    assert finish.reason is FinishReason.ABORT


def test_abort_all_of_one_tenant() -> None:
    fleet = LocalFleet()
    mine = fleet.submit(tokens(20), 50, tenant="alice")
    theirs = fleet.submit(tokens(22), 5, tenant="bob")
    fleet.turn()
    fleet.from_tokenizer(Operation(1, "abort_all", tenant="alice"))
    fleet.run()
    assert fleet.tokenizer.done[1].detail == "1 requests aborted"
    assert fleet.request(mine).finish is not None
    assert fleet.request(mine).finish.reason is FinishReason.ABORT  # type: ignore[union-attr]
    fleet.assert_answered(theirs)


STEPS = st.lists(st.tuples(st.floats(0, 30), st.integers(0, 12)), max_size=40)


@given(per_minute=st.integers(1, 30), steps=STEPS)
def test_a_bucket_never_gives_more_than_it_had_and_got(per_minute: int, steps: list[tuple[float, int]]) -> None:
    now = given_away = 0.0
    bucket = Bucket(per_minute, now)
    for pause, wishes in steps:
        now += pause
        for _ in range(wishes):
            wait = bucket.wait(1, now)
            if not wait:
                bucket.take(1)
                given_away += 1
            else:
                assert wait <= 60 / per_minute + 1e-6
        assert given_away <= per_minute + now * per_minute / 60 + 1e-6


ACTIONS = st.one_of(
    st.tuples(st.just("submit"), st.sampled_from("abc"), st.integers(1, 30)),
    st.tuples(st.just("abort"), st.sampled_from("abc"), st.integers(0, 9)),
    st.tuples(st.just("turn"), st.just(""), st.integers(1, 3)),
    st.tuples(st.just("abort_all"), st.sampled_from("abc"), st.just(0)),
)


@settings(max_examples=40, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=25))
def test_books_of_tenants_are_even_whatever_happens(actions: list[tuple[str, str, int]]) -> None:
    fleet = LocalFleet()
    sent = 0
    for kind, tenant, number in actions:
        if kind == "submit":
            name = f"n{sent % 5}"
            fleet.submit(tokens(number, seed=sent), number, rid=f"{tenant}:{sent}", tenant=tenant, names=(name,))
            sent += 1
        elif kind == "abort":
            fleet.from_tokenizer(AbortRequest((), names=(f"n{number}",), tenant=tenant))
        elif kind == "abort_all":
            fleet.from_tokenizer(Operation(99, "abort_all", tenant=tenant))
        else:
            for _ in range(number):
                fleet.turn()
                for worker in fleet.workers.values():
                    if worker.commands:
                        fleet.step(worker)
    fleet.run()
    used = fleet.core.board.build().tenants
    assert len(fleet.core.names) == 0
    assert all(tenant.live == 0 for tenant in used)
    assert sum(tenant.requests for tenant in used) == sent
    finished = fleet.core.lifecycle.requests.values()
    assert sum(tenant.output_tokens for tenant in used) == sum(len(request.output) for request in finished)
