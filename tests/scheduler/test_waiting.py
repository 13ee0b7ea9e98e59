"""The order of the waiting queue."""

from __future__ import annotations

from services.scheduler.request import Request
from services.scheduler.waiting import WaitingQueue
from shared import ints
from shared.messages.request import GenerateRequest, SamplingParams


def request(
    sequence: int, *, priority: int = 0, arrival: float = 0.0, length: int = 3, resumed: bool = False
) -> Request:
    message = GenerateRequest(f"r{sequence}", "t/1", ints.pack(range(length)), SamplingParams(), priority=priority)
    made = Request(message, b"t/1", arrival, sequence)
    made.resumed = resumed
    return made


def names(queue: WaitingQueue, now: float = 0.0) -> list[str]:
    return [r.request_id for r in queue.in_order(now)]


def test_fcfs_serves_by_priority_then_arrival() -> None:
    queue = WaitingQueue()
    for sequence, priority in ((1, 0), (2, 5), (3, 0), (4, 5), (5, -1)):
        queue.add(request(sequence, priority=priority))
    assert names(queue) == ["r2", "r4", "r1", "r3", "r5"]


def test_resumed_requests_come_first_and_oldest_first() -> None:
    queue = WaitingQueue()
    queue.add(request(1))
    for sequence in (9, 4, 7):
        queue.add(request(sequence, resumed=True))
    assert names(queue) == ["r4", "r7", "r9", "r1"]


def test_lpm_serves_the_longest_match_first_but_whoever_waits_long_before_all() -> None:
    matches = {"r1": 0, "r2": 50, "r3": 100, "r4": 100}
    queue = WaitingQueue("lpm", ageing_seconds=5.0, longest_match=lambda r: matches[r.request_id])
    for sequence in (4, 1, 2, 3):
        queue.add(request(sequence, arrival=float(sequence)))
    assert names(queue, now=4.5) == ["r3", "r4", "r2", "r1"]
    assert names(queue, now=6.5) == ["r1", "r3", "r4", "r2"]


def test_lpm_asks_for_a_match_again_only_after_a_moment() -> None:
    asked: list[str] = []
    queue = WaitingQueue("lpm", longest_match=lambda r: asked.append(r.request_id) or 0)  # type: ignore[func-returns-value]
    queue.add(request(1))
    names(queue, now=1.0)
    names(queue, now=1.05)
    assert asked == ["r1"]
    names(queue, now=1.2)
    assert asked == ["r1", "r1"]


def test_counts_follow_every_change() -> None:
    queue = WaitingQueue()
    first, second = request(1, length=10), request(2, length=20, resumed=True)
    queue.add(first)
    queue.add(second)
    assert (len(queue), queue.tokens) == (2, 30)
    assert first in queue
    queue.remove(first)
    queue.remove(first)
    assert (len(queue), queue.tokens) == (1, 20)
    assert first not in queue
    queue.remove(second)
    assert (len(queue), queue.tokens, list(queue)) == (0, 0, [])
