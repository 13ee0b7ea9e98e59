"""Decode rows that share pages are told to the worker as groups; the fake engine checks each one against its pages."""

from __future__ import annotations

from shared import ints
from shared.messages.step import StepCommand
from tests.local_fleet import LocalFleet, tokens
from tests.local_peers import LocalWorker

PAGE = 16


def groups_of(command: StepCommand) -> list[tuple[int, int]]:
    """(rows, pages) of each group, the largest first."""
    sizes, pages = ints.unpack(command.group_sizes), ints.unpack(command.group_pages)
    return sorted(zip(sizes, pages, strict=True), reverse=True)


def run_until_grouped(fleet: LocalFleet, worker: LocalWorker, rows: int) -> list[tuple[int, int]]:
    """The groups of a step in which `rows` rows decode, once those that came last are in them."""
    found: list[list[tuple[int, int]]] = []
    while worker.commands and len(found) < 24:
        command = worker.commands[0]
        if ints.count(command.decode_slots) == rows:
            found.append(groups_of(command))
        fleet.step(worker)
        fleet.turn()
    return found[-1]


def submit(fleet: LocalFleet, prefix: list[int], seeds: range) -> list[str]:
    return [fleet.submit(prefix + tokens(5, seed=seed), 40) for seed in seeds]


def test_rows_with_one_prefix_are_one_group() -> None:
    fleet = LocalFleet()
    rids = submit(fleet, tokens(PAGE * 10, seed=1), range(10, 14))
    fleet.turn()
    assert run_until_grouped(fleet, fleet.workers["w0/1"], 4) == [(4, 10)]
    fleet.run()
    fleet.assert_answered(*rids)
    assert fleet.workers["w0/1"].engine.shared_reads > 0


def test_few_rows_that_come_one_by_one_are_soon_one_group() -> None:
    """Each arrives a step after the one before; all but the last few steps of the first would else read alone."""
    fleet = LocalFleet()
    worker, prefix = fleet.workers["w0/1"], tokens(PAGE * 10, seed=1)
    rids: list[str] = []
    seen: list[list[tuple[int, int]]] = []  # of the steps in which all eight decode
    while len(seen) < 4:
        if len(rids) < 8:
            rids += submit(fleet, prefix, range(10 + len(rids), 11 + len(rids)))
        fleet.turn()
        command = worker.commands[0]
        if ints.count(command.decode_slots) == 8:
            seen.append(groups_of(command))
        fleet.step(worker)
    assert [(8, 10)] in seen[:3]
    fleet.run()
    fleet.assert_answered(*rids)


def test_nested_prefixes_are_nested_groups() -> None:
    fleet = LocalFleet()
    system = tokens(PAGE * 10, seed=1)
    rids = submit(fleet, system + tokens(PAGE * 40, seed=2), range(10, 12))
    rids += submit(fleet, system + tokens(PAGE * 20, seed=3), range(20, 23))
    fleet.turn()
    assert run_until_grouped(fleet, fleet.workers["w0/1"], 5) == [(5, 10), (3, 30), (2, 50)]
    fleet.run()
    fleet.assert_answered(*rids)


def test_a_level_has_pages_enough_of_its_own() -> None:
    """Of three prefixes within each other, the second goes on for too few pages to be read by itself."""
    fleet = LocalFleet()
    system, chat = tokens(PAGE * 10, seed=1), tokens(PAGE * 12, seed=2)
    rids = submit(fleet, system, range(10, 13)) + submit(fleet, system + chat[: PAGE * 3], range(20, 22))
    rids += submit(fleet, system + chat, range(30, 32))
    fleet.turn()
    assert run_until_grouped(fleet, fleet.workers["w0/1"], 7) == [(7, 10), (2, 22)]
    fleet.run()
    fleet.assert_answered(*rids)


def test_a_long_common_prefix_of_many_beats_short_ones_of_few() -> None:
    fleet = LocalFleet()
    system = tokens(PAGE * 30, seed=1)
    rids = submit(fleet, system + tokens(PAGE, seed=2), range(10, 12))
    rids += submit(fleet, system, range(20, 24))
    fleet.turn()
    assert run_until_grouped(fleet, fleet.workers["w0/1"], 6) == [(6, 30)]
    fleet.run()
    fleet.assert_answered(*rids)


def test_short_prefixes_and_other_prompts_make_no_groups() -> None:
    fleet = LocalFleet()
    rids = submit(fleet, tokens(PAGE * 7, seed=1), range(10, 13)) + submit(fleet, tokens(PAGE * 20, seed=5), range(1))
    fleet.turn()
    assert run_until_grouped(fleet, fleet.workers["w0/1"], 4) == []
    fleet.run()
    fleet.assert_answered(*rids)


def test_slots_that_change_hands_leave_their_groups() -> None:
    """Many short requests over few slots; a group with a slot of another prompt would be a protocol error."""
    fleet = LocalFleet(hello={"max_slots": 6})
    system = tokens(PAGE * 9, seed=7)
    prefixes = [tokens(PAGE * 9, seed=1), system, system + tokens(PAGE * 8, seed=2)]
    rids = [fleet.submit(prefixes[i % 3] + tokens(3, seed=50 + i), 2 + i % 7) for i in range(60)]
    fleet.run()
    fleet.assert_answered(*rids)
    assert fleet.workers["w0/1"].engine.shared_reads > 0
