"""The two lines operators of such servers know, with the numbers they know."""

from __future__ import annotations

import re

import pytest
import structlog
from structlog.testing import capture_logs

from tests.local_fleet import LocalFleet, tokens

PREFILL = re.compile(
    r"Prefill batch, #new-seq: (\d+), #new-token: (\d+), #cached-token: (\d+), token usage: (\d\.\d\d), "
    r"#running-req: (\d+), #queue-req: (\d+)"
)
DECODE = re.compile(
    r"Decode batch, #running-req: (\d+), #token: (\d+), token usage: (\d\.\d\d), "
    r"gen throughput \(token/s\): (\d+\.\d), #queue-req: (\d+)"
)


@pytest.fixture(autouse=True)
def _all_levels() -> None:
    structlog.reset_defaults()


def matches(pattern: re.Pattern[str], logs: list[dict[str, object]]) -> list[tuple[str, ...]]:
    return [found.groups() for entry in logs if (found := pattern.fullmatch(str(entry["event"])))]


def test_each_prefill_step_has_a_line() -> None:
    fleet = LocalFleet(hello={"max_batched_tokens": 64, "max_inflight_steps": 1})
    with capture_logs() as logs:
        fleet.submit(tokens(100), 3)
        for _ in range(4):
            fleet.clock.advance(0.1)
            fleet.turn()
            worker = fleet.workers["w0/1"]
            if worker.commands:
                fleet.step(worker)
        fleet.submit(tokens(100), 3)
        fleet.clock.advance(0.1)
        fleet.turn()
    lines = matches(PREFILL, logs)
    assert [line[:3] for line in lines] == [("1", "64", "0"), ("1", "36", "0"), ("1", "1", "99")]
    assert lines[0][4:] == ("0", "0")


def test_hurried_prefills_share_a_line_and_none_is_left_out() -> None:
    fleet = LocalFleet(hello={"max_batched_tokens": 64})
    with capture_logs() as logs:
        for index in range(5):
            fleet.submit(tokens(60, seed=index), 2)
        fleet.run()
        fleet.clock.advance(1.0)
        fleet.heartbeats()
        fleet.turn()
    lines = matches(PREFILL, logs)
    assert sum(int(line[1]) for line in lines) == 300
    assert len(lines) == 2


def test_decode_steps_have_a_line_per_interval() -> None:
    fleet = LocalFleet(decode_log_interval=10, hello={"max_inflight_steps": 1})
    with capture_logs() as logs:
        for index in range(3):
            fleet.submit(tokens(10, seed=index), 41)
        fleet.turn()
        for _ in range(41):
            fleet.step(fleet.workers["w0/1"])
            fleet.clock.advance(0.05)
            fleet.heartbeats()
            fleet.turn()
    lines = matches(DECODE, logs)
    assert len(lines) == 4
    assert [line[0] for line in lines] == ["3"] * 4
    assert [float(line[3]) for line in lines[1:]] == [60.0] * 3


def test_idle_time_does_not_slow_the_throughput_shown() -> None:
    fleet = LocalFleet(decode_log_interval=10, hello={"max_inflight_steps": 1})
    with capture_logs() as logs:
        for round_ in range(2):
            fleet.submit(tokens(10, seed=round_), 21)
            fleet.turn()
            for _ in range(21):
                fleet.step(fleet.workers["w0/1"])
                fleet.clock.advance(0.05)
                fleet.heartbeats()
                fleet.turn()
            fleet.run()
            for _ in range(100):
                fleet.clock.advance(1.0)
                fleet.heartbeats()
                fleet.turn()
    assert all(15 < float(line[3]) < 25 for line in matches(DECODE, logs))
