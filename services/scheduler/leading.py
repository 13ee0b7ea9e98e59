"""Takes what a grammar forces after a result before the next step is planned, where that step waited for the result.

    run-ahead   ... t |  f1 |  t+1 f1..fn |       the row behind t is under way before t is known, and samples f1 again
    led         ... t |  t f1 .. fn |             tokens, known at once: output, and one chunk with the last sample

A row of every forced run is spared, and that of a text that is complete; the worker waits for its next step meanwhile.
`holds` says where that is the better bargain. Leaves masks to masking and the chunks themselves to jumping.
"""

from __future__ import annotations

from collections.abc import Callable

from services.scheduler.constraint.masks import lead_row
from services.scheduler.guide import Guide
from services.scheduler.masking import Masking
from services.scheduler.metrics import Metrics
from services.scheduler.pace import PAUSE_MS
from services.scheduler.request import Request
from services.scheduler.worker import Worker

SLOW_MS = 5.0
"""A state that takes longer to be led is left to the threads that fill masks."""


class Leading:
    """`touch(request)` has its new tokens sent."""

    def __init__(self, masking: Masking, metrics: Metrics, touch: Callable[[Request], None]) -> None:
        self._masking = masking
        self._metrics = metrics
        self._touch = touch

    def holds(self, worker: Worker) -> bool:
        """Whether the next step waits for the results of those in flight."""
        missing = worker.pace.tokens_in(PAUSE_MS)
        for request in worker.guided.values():
            guide = request.guide
            if guide is not None and guide.may_lead(request):
                missing -= guide.spared
                if missing < 0:
                    return True
        return False

    def lead(self, worker: Worker) -> None:
        """Every constrained request whose rows are all back takes what must follow."""
        for request in list(worker.guided.values()):
            guide = request.guide
            if guide is not None and request.inflight_rows == 0 and guide.has_news(request):
                self._lead(request, guide)

    def _lead(self, request: Request, guide: Guide) -> None:
        budget = request.max_tokens - len(request.output)
        outcome = lead_row(guide.state, guide.take_accepted(request), budget)
        guide.led_slowly |= outcome.elapsed_ms > SLOW_MS
        guide.count_spared(spared=bool(outcome.forced))
        self._metrics.count("forced_tokens", len(outcome.forced))
        self._masking.take_lead(request, guide, outcome)
        self._touch(request)
