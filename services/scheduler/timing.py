"""When the next step of a worker that is computing is planned: late, so that whoever arrives meanwhile is part of it.

    step t       |=================================|
    planned                               t+1 ^      |  what came until then need not wait for t+2
                                              |margin|

Too late only costs the pause between a result and the next command; too early costs new requests a whole step. Leaves
what is planned to the planner.
"""

from __future__ import annotations

from services.scheduler.drafting import MOST_ROWS
from services.scheduler.inflight import InflightStep
from services.scheduler.worker import Worker

MARGIN_MS = 10.0
"""A step is planned so long before it may begin, at least,"""
MARGIN_SHARE = 0.2
"""or by so much of what the steps before it take."""


def plan_at(worker: Worker) -> float:
    """The time from which the next step may be planned; it is past where nothing is known of what is under way."""
    expected = sum(_expected_ms(worker, step) for step in worker.inflight)
    return worker.head_since + (expected - max(MARGIN_MS, MARGIN_SHARE * expected)) / 1e3


def _expected_ms(worker: Worker, step: InflightStep) -> float:
    size = step.num_tokens
    if size <= MOST_ROWS and worker.cost.known:
        fixed, each = worker.cost.parts()
        return fixed + each * size
    return 1e3 * size / worker.prefill_rate if worker.prefill_rate > 0 else 0.0
