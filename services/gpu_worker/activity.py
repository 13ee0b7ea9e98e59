"""What the compute thread is doing and has done, for heartbeats; written by that thread, read by the event loop."""

from __future__ import annotations

import time

from services.gpu_worker.engine import StepStats
from shared.metrics import Histogram


class Activity:
    """Plain numbers, each with one writer: a reader may see them a step apart, never torn."""

    def __init__(self) -> None:
        self.last_step = -1
        self.steps = 0
        self.stats = StepStats()
        self._running_since = 0.0  # 0: idle, or waiting for masks, which is not the worker's time
        self._busy_s = 0.0
        self._asked_at = time.monotonic()
        self._busy_when_asked = 0.0
        self._forward = Histogram()
        self._totals = {"decode_tokens": 0, "prefill_tokens": 0}

    def begin(self) -> None:
        """A step starts, or goes on after it may have waited for masks."""
        if not self._running_since:
            self._running_since = time.monotonic()

    def pause(self) -> None:
        """The step waits or has ended."""
        if self._running_since:
            self._busy_s += time.monotonic() - self._running_since
        self._running_since = 0.0

    def finish(self, step_id: int, stats: StepStats) -> None:
        """A step was executed."""
        self.last_step = step_id
        self.steps += 1
        self.stats = stats
        self._forward.observe(stats.forward_ms / 1e3)
        self._totals["decode_tokens"] += stats.decode_rows
        self._totals["prefill_tokens"] += stats.tokens - stats.decode_rows

    def forget(self) -> None:
        """A new incarnation counts its steps from 0."""
        self.last_step = -1

    def step_age_ms(self) -> float:
        """How long the step now in execution has been running; 0 when idle."""
        since = self._running_since
        return (time.monotonic() - since) * 1e3 if since else 0.0

    def gauges(self) -> dict[str, float]:
        """Measurements since the start, and the busy share since the last call."""
        now = time.monotonic()
        since = self._running_since
        busy = self._busy_s + (now - since if since else 0.0)
        share = (busy - self._busy_when_asked) / max(now - self._asked_at, 1e-9)
        self._busy_when_asked, self._asked_at = busy, now
        stats = self.stats
        return {
            "steps": float(self.steps),
            "busy": min(max(share, 0.0), 1.0),
            "busy_seconds": busy,
            "decode_rows": float(stats.decode_rows),
            "prefill_rows": float(stats.prefill_rows),
            "batch_tokens": float(stats.tokens),
            "forward_ms": stats.forward_ms,
            "sample_ms": stats.sample_ms,
            "mask_wait_ms": stats.mask_wait_ms,
            "kv_bytes_read": float(stats.kv_bytes_read),
            "is_cuda_graph": float(stats.is_cuda_graph),
            **{name: float(value) for name, value in self._totals.items()},
        }

    def histograms(self) -> dict[str, tuple[float, ...]]:
        """Durations in seconds."""
        return {"forward_seconds": self._forward.snapshot()}
