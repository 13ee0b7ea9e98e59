"""What the door measures itself: requests, first tokens, gaps between tokens; leaves exposition to exposition.py."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from services.tokenizer.output import Output
from shared.metrics import Histogram

TTFT = "time_to_first_token_seconds"
ITL = "inter_token_latency_seconds"
RESPONSES = "http_responses_"  # and the status: how a heartbeat calls them
E2E = "e2e_request_latency_seconds"


class Measurements:
    """Numbers of one tokenizer process since its start."""

    def __init__(self) -> None:
        self.histograms = {TTFT: Histogram(), ITL: Histogram(), E2E: Histogram()}
        self.counters: Counter[str] = Counter(http_requests=0, answers_finished=0, answers_aborted=0)
        self.responses: Counter[int] = Counter()  # by HTTP status
        self.active = 0
        self.log_requests = False  # whether the door says a line about each request
        self.cpu_seconds = time.process_time

    def gauges(self) -> dict[str, float]:
        """For the heartbeat."""
        return {
            "http_requests_active": float(self.active),
            "process_cpu_seconds": self.cpu_seconds(),
            **{name: float(value) for name, value in self.counters.items()},
            **{f"{RESPONSES}{status}": float(value) for status, value in self.responses.items()},
        }

    def snapshots(self) -> dict[str, tuple[float, ...]]:
        """For the heartbeat, in the form of shared.metrics."""
        return {name: histogram.snapshot() for name, histogram in self.histograms.items()}


class RequestTimer:
    """The clock of one HTTP request, from its arrival."""

    def __init__(self, measurements: Measurements, num_streams: int, *, streaming: bool) -> None:
        self.started = time.monotonic()
        self._measurements = measurements
        self._streaming = streaming  # only then does a token leave when it comes
        self._last: list[float | None] = [None] * num_streams
        self.on_close: Callable[[bool], None] | None = None  # is told whether it finished

    def news(self, index: int, output: Output) -> None:
        """Tokens of stream `index` are about to be written."""
        num_tokens = len(output.token_ids)
        if not num_tokens or not self._streaming:
            return
        now = time.monotonic()
        last = self._last[index]
        histograms = self._measurements.histograms
        if last is None:
            histograms[TTFT].observe(now - self.started)
        else:
            histograms[ITL].observe((now - last) / num_tokens, num_tokens)
        self._last[index] = now

    def close(self, *, finished: bool) -> None:
        self._measurements.counters["answers_finished" if finished else "answers_aborted"] += 1
        if self.on_close is not None:
            self.on_close(finished)
        if finished:
            self._measurements.histograms[E2E].observe(time.monotonic() - self.started)
