"""SystemStatus: the whole system in one picture, at most five a second. Leaves sending it to the frontends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shared.messages.control import Heartbeat, ServiceMetrics, ServiceName
from shared.messages.request import SystemStatus

if TYPE_CHECKING:
    from services.scheduler.core import Core

MIN_INTERVAL_S = 0.2
MAX_INTERVAL_S = 1.0


class StatusBoard:
    def __init__(self, core: Core) -> None:
        self.detail = ""  # set while draining
        self._core = core
        self._fleet = core.fleet
        self._lifecycle = core.lifecycle
        self._outbox = core.outbox
        self._shown: tuple[object, ...] = ()
        self._shown_at = float("-inf")

    @property
    def not_ready(self) -> str:
        """Why no request can be served right now; empty when one can."""
        if self.detail:
            return self.detail
        if not len(self._fleet):
            return "no worker is connected"
        if all(worker.draining for worker in self._fleet):
            return "every worker is leaving"
        if not self._outbox.detokenizers:
            return "no detokenizer is connected"
        return ""

    def due_in(self) -> float:
        """Seconds until the picture should be shown again; 0 or less means now."""
        age = self._core.clock.now() - self._shown_at
        if age < MIN_INTERVAL_S:
            return MIN_INTERVAL_S - age
        wait = MIN_INTERVAL_S if self._essence() != self._shown else MAX_INTERVAL_S
        return wait - age

    def picture(self) -> SystemStatus:
        """What there is now; `due_in` counts from here."""
        self._shown = self._essence()
        self._shown_at = self._core.clock.now()
        return self.build()

    def _essence(self) -> tuple[object, ...]:
        """What makes a picture worth sending when it changes."""
        return (
            self.not_ready,
            self._lifecycle.num_running,
            len(self._lifecycle.waiting),
            tuple(self._fleet.workers),
            tuple(self._outbox.detokenizers),
        )

    def build(self) -> SystemStatus:
        now = self._core.clock.now()
        model = self._fleet.model
        reason = self.not_ready
        return SystemStatus(
            epoch=self._core.epoch,
            ready=not reason,
            num_running=self._lifecycle.num_running,
            num_waiting=len(self._lifecycle.waiting) + len(self._lifecycle.suspended),
            max_request_tokens=self._fleet.max_request_tokens,
            page_size=self._core.tree.page_size,
            detokenizers=tuple((d.key, d.endpoint) for d in self._outbox.detokenizers.values()),
            workers=tuple(w.status(now, self._core.tree.evictable_pages(w.key)) for w in self._fleet),
            counters=self._counters(),
            services=self._services(now),
            model=model.model if model else "",
            detail=reason,
            retry_after_s=1.0 if reason else 0.0,
            tenants=self._core.tenants.usage(),
        )

    def _counters(self) -> dict[str, float]:
        page_size = self._core.tree.page_size
        used = total = cached = 0
        for worker in self._fleet:
            evictable = self._core.tree.evictable_pages(worker.key)
            total += worker.hello.num_pages * page_size
            cached += evictable * page_size
            used += (worker.hello.num_pages - worker.pool.free - evictable) * page_size
        hit_rate, throughput = self._core.metrics.rates()
        counters: dict[str, float] = dict(self._core.metrics.counters)
        counters.update(
            running_requests=self._lifecycle.num_running,
            paused_requests=self._lifecycle.num_running if self._core.operations.paused else 0,
            waiting_requests=len(self._lifecycle.waiting),
            suspended_requests=len(self._lifecycle.suspended),
            compiling_requests=len(self._lifecycle.compiling),
            waiting_tokens=self._lifecycle.waiting.tokens,
            used_tokens=used,
            evictable_tokens=cached,
            max_total_tokens=total,
            pinned_tokens=page_size * sum(self._core.pins.pages(worker.key) for worker in self._fleet),
            token_usage=used / total if total else 0.0,
            gen_throughput=throughput,
            cache_hit_rate=hit_rate,
            tree_nodes=self._core.tree.num_nodes,
            new_token_ratio=max((worker.shortage for worker in self._fleet), default=0.0),
            **self._core.compiling.counters(),
        )
        return counters

    def _services(self, now: float) -> tuple[ServiceMetrics, ...]:
        services = [
            ServiceMetrics(
                "scheduler",
                "scheduler",
                self._core.metrics.gauges(),
                {
                    "queue_time": self._core.metrics.queue_time.snapshot(),
                    "mask_seconds": self._core.metrics.mask_time.snapshot(),
                    "mask_row_seconds": self._core.metrics.mask_row_time.snapshot(),
                    "mask_wait_seconds": self._core.metrics.mask_wait.snapshot(),
                    "loop_cpu_seconds": self._core.metrics.loop_cpu.snapshot(),
                },
            )
        ]
        services += [
            _service("worker", worker.worker_id, worker.heartbeat, now - worker.last_heard) for worker in self._fleet
        ]
        services += [
            _service("detokenizer", d.service_id, d.heartbeat, now - d.last_heard)
            for d in self._outbox.detokenizers.values()
        ]
        services += [
            _service("tokenizer", t.service_id, t.heartbeat, now - t.last_heard)
            for t in self._core.frontends.tokenizers.values()
        ]
        return tuple(services)


def _service(name: ServiceName, service_id: str, heartbeat: Heartbeat | None, age: float) -> ServiceMetrics:
    if heartbeat is None:
        return ServiceMetrics(name, service_id, heartbeat_age_s=round(age, 3))
    return ServiceMetrics(name, service_id, heartbeat.gauges, heartbeat.histograms, round(age, 3))
