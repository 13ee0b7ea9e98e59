"""What a running server has counted, read from its /metrics once the picture behind them is surely new enough."""

import httpx

from tests.system.processes import eventually


def shown(url: str, start: str) -> float:
    """The sum of all samples whose name and labels begin so."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"radixfleet_{start}"))


def let_settle(url: str) -> None:
    """Until the scheduler's counters hold all that is answered now: its picture is renewed from time to time, and the
    next one but one was surely drawn later than now."""
    for _ in range(2):
        turns = shown(url, "service_turns{")
        assert eventually(lambda turns=turns: shown(url, "service_turns{") != turns, 10.0)


def count(url: str, name: str) -> float:
    """What the scheduler has counted, all that is answered included."""
    let_settle(url)
    return shown(url, f"scheduler_{name}_total")
