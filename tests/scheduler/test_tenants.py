"""Budgets of tenants, what they are told of their use, and aborts by name across frontends."""

from __future__ import annotations

import stat
from pathlib import Path

from shared import ints
from shared.messages.request import AbortRequest, Operation, RequestRejected, TenantUsage
from shared.messages.stream import FinishReason
from tests.fake_engine import generate
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
