"""The load of the whole system in a few numbers, derived from one SystemStatus; shown by /metrics and /get_load."""

from __future__ import annotations

import msgspec

from shared.messages.request import SystemStatus


class Load(msgspec.Struct, frozen=True):
    """All zero where nothing is known. Tokens are slots of the KV pool."""

    running: int = 0
    waiting: int = 0
    capacity: int = 0
    free_tokens: int = 0
    cached_tokens: int = 0
    seats: int = 0
    workers: int = 0
    throughput: float = 0.0
    hit_rate: float = 0.0
    suspended: float = 0.0
    compiling: float = 0.0
    paused: float = 0.0
    kept_share: float = 0.0
    load_weights_seconds: float = 0.0
    startup_seconds: float = 0.0
    cuda_graph: float = 0.0  # 1: the last step of a worker was a replay

    @property
    def used_tokens(self) -> int:
        """Held by running requests: neither free nor evictable."""
        return self.capacity - self.free_tokens - self.cached_tokens

    @property
    def usage(self) -> float:
        return self.used_tokens / self.capacity if self.capacity else 0.0

    @property
    def utilization(self) -> float:
        return self.running / self.seats if self.seats else 0.0

    @staticmethod
    def of(status: SystemStatus | None) -> Load:
        if status is None:
            return Load()
        size = status.page_size
        counters = status.counters
        return Load(
            running=status.num_running,
            waiting=status.num_waiting,
            capacity=size * sum(worker.num_pages for worker in status.workers),
            free_tokens=size * sum(worker.pages_free for worker in status.workers),
            cached_tokens=size * sum(worker.pages_cached for worker in status.workers),
            seats=sum(worker.max_slots for worker in status.workers),
            workers=sum(worker.ready and not worker.draining for worker in status.workers),
            throughput=counters.get("gen_throughput", 0.0),
            hit_rate=counters.get("cache_hit_rate", 0.0),
            suspended=counters.get("suspended_requests", 0.0),
            compiling=counters.get("compiling_requests", 0.0),
            paused=counters.get("paused_requests", 0.0),
            kept_share=counters.get("new_token_ratio", 0.0),
            load_weights_seconds=_slowest(status, "load_weights_seconds"),
            startup_seconds=_slowest(status, "startup_seconds"),
            cuda_graph=_slowest(status, "is_cuda_graph"),
        )


def _slowest(status: SystemStatus, gauge: str) -> float:
    """The largest value that any worker gives for a gauge."""
    return max((s.gauges.get(gauge, 0.0) for s in status.services if s.service == "worker"), default=0.0)
