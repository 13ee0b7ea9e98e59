"""Which worker gets a request."""

from __future__ import annotations

import random

import pytest

from services.scheduler.placement_choice import common_tokens
from shared import ints
from tests.local_fleet import LocalFleet, tokens


def worker_of(fleet: LocalFleet, rid: str) -> str:
    worker = fleet.request(rid).worker
    assert worker is not None
    return worker.worker_id


def test_a_request_goes_where_its_prefix_is() -> None:
    fleet = LocalFleet(workers=3)
    prompts = [tokens(200, seed=i) for i in range(3)]
    first = [fleet.submit(prompt, 4) for prompt in prompts]
    fleet.turn()
    homes = [worker_of(fleet, rid) for rid in first]
    assert sorted(homes) == ["w0", "w1", "w2"]
    fleet.run()
    again = [fleet.submit(prompt + tokens(5, seed=9), 4) for prompt in reversed(prompts)]
    fleet.turn()
    assert [worker_of(fleet, rid) for rid in again] == list(reversed(homes))
    fleet.run()
    fleet.assert_answered(*first, *again)


def test_no_worker_idles_while_another_queues() -> None:
    fleet = LocalFleet(workers=2, hello={"max_slots": 4})
    shared = tokens(100)
    fleet.submit(shared, 2)
    fleet.run()
    rids = [fleet.submit(shared + tokens(5, seed=i), 30) for i in range(8)]
    fleet.turn()
    assert len(fleet.core.waiting) == 0 or all(worker.running for worker in fleet.core.fleet)
    fleet.run()
    fleet.assert_answered(*rids)
    assert all(worker.engine.decode_rows for worker in fleet.workers.values())


def test_equal_work_is_spread_evenly() -> None:
    fleet = LocalFleet(workers=4)
    rids = [fleet.submit(tokens(20, seed=i), 20) for i in range(16)]
    fleet.run()
    fleet.assert_answered(*rids)
    rows = [worker.engine.decode_rows for worker in fleet.workers.values()]
    assert rows == [4 * 19] * 4


def test_a_little_cached_does_not_outweigh_a_crowd() -> None:
    fleet = LocalFleet(workers=2)
    system = tokens(32)
    fleet.submit(system, 2)
    fleet.run()
    rids = [fleet.submit(system + tokens(30, seed=i), 40) for i in range(10)]
    fleet.turn()
    homes = [worker_of(fleet, rid) for rid in rids if fleet.request(rid).worker]
    fleet.run()
    fleet.assert_answered(*rids)
    assert len(set(homes)) == 2


def test_a_group_stays_together_while_there_is_room() -> None:
    fleet = LocalFleet(workers=3, hello={"max_slots": 4})
    prompt = tokens(60)
    rids = [fleet.submit(prompt, 20, group_id="g") for _ in range(5)]
    homes: dict[str, str] = {}
    fleet.turn()
    while any(worker.commands for worker in fleet.workers.values()):
        homes.update({rid: worker_of(fleet, rid) for rid in rids if fleet.request(rid).worker})
        for worker in fleet.workers.values():
            if worker.commands:
                fleet.step(worker)
        fleet.turn()
    fleet.assert_answered(*rids)
    assert len(set(homes.values())) == 2, "four seats are one worker's, the fifth choice must go elsewhere"
    assert fleet.prefill_tokens == 60 + 3 + 60


def test_members_that_come_later_join_their_group() -> None:
    fleet = LocalFleet(workers=3)
    rid = fleet.submit(tokens(20), 100, group_id="g")
    fleet.turn()
    home = worker_of(fleet, rid)
    members = [fleet.submit(tokens(20, seed=1 + i), 20, group_id="g") for i in range(5)]
    for _ in range(3):
        for worker in fleet.workers.values():
            if worker.commands:
                fleet.step(worker)
        fleet.turn()
    assert {worker_of(fleet, member) for member in members} == {home}
    fleet.run()
    fleet.assert_answered(rid, *members)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_prefix_in_the_making_attracts_its_like(workers: int) -> None:
    fleet = LocalFleet(workers=workers, hello={"max_batched_tokens": 64})
    shared = tokens(800)
    first = fleet.submit(shared + tokens(4, seed=1), 3)
    fleet.turn()
    like = fleet.submit(shared + tokens(4, seed=2), 3)
    fleet.run()
    fleet.assert_answered(first, like)
    assert fleet.prefill_tokens <= 2 * 804
    assert fleet.stream(like).cached_tokens in (0, 800)


def test_common_tokens_is_the_length_of_the_common_prefix() -> None:
    rng = random.Random(5)
    for _ in range(300):
        shared = rng.choices(range(5), k=rng.randrange(40))
        a, b = shared + rng.choices(range(5), k=rng.randrange(9)), shared + rng.choices(range(5), k=rng.randrange(9))
        wanted = 0
        while wanted < min(len(a), len(b)) and a[wanted] == b[wanted]:
            wanted += 1
        assert common_tokens(ints.pack(a), ints.pack(b)) == wanted
