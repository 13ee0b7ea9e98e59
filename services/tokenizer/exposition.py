"""Prometheus text of the whole system: three families of names over one picture.

`radixfleet_*` are ours, `sglang:*` and the three `sglang_*` counters are what dashboards of such servers read.
Values come from the last SystemStatus (nothing is counted twice) and from the door's own measurements.
Leaves measuring to metrics and to the other services.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from services.tokenizer.frontend import Frontend
from services.tokenizer.labels import CustomLabels
from services.tokenizer.load import Load
from services.tokenizer.metrics import E2E, ITL, RESPONSES, TTFT, Measurements
from shared.messages.control import ServiceMetrics
from shared.messages.request import SystemStatus
from shared.metrics import BUCKETS, FINE_BUCKETS

# our name, SGLang's name, what it counts, key in SystemStatus.counters
COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of admitted requests", "prompt_tokens"),
    ("generation_tokens", "generation_tokens", "Generated tokens", "decode_tokens"),
    ("cached_tokens", "cached_tokens", "Prompt tokens found in the radix cache", "cache_hit_tokens"),
    ("requests", "num_requests", "Requests received by the scheduler", "requests"),
    ("constrained_requests", "num_so_requests", "Requests with constrained output", "constrained_requests"),
    ("requests_aborted", "num_aborted_requests", "Requests ended by their clients", "requests_aborted"),
    ("evicted_tokens", "evicted_tokens", "Cached tokens evicted", "evicted_tokens"),
    ("retractions", "num_retracted_requests", "Requests suspended for lack of pages", "retractions"),
    ("computed_prompt_tokens", "", "Prompt tokens that had to be computed", "cache_miss_tokens"),
)
SEED_COUNTERS: tuple[tuple[str, str, str, dict[str, str]], ...] = (
    ("sglang_cache_hit", "Number of KV cache hits in tokens", "cache_hit_tokens", {"type": "radix"}),
    ("sglang_cache_miss", "Number of KV cache misses in tokens", "cache_miss_tokens", {"type": "radix"}),
    ("sglang_decode_tokens", "Number of tokens decoded", "decode_tokens", {}),
)
HISTOGRAMS = (  # name, who measures it, its key there
    (TTFT, "tokenizer", TTFT),
    (ITL, "tokenizer", ITL),
    (E2E, "tokenizer", E2E),
    ("queue_time_seconds", "scheduler", "queue_time"),
    ("mask_seconds", "scheduler", "mask_seconds"),
    ("mask_row_seconds", "scheduler", "mask_row_seconds"),
    ("mask_wait_seconds", "scheduler", "mask_wait_seconds"),
    ("scheduler_loop_cpu_seconds", "scheduler", "loop_cpu_seconds"),
)
FINE = frozenset({"mask_seconds", "mask_row_seconds", "mask_wait_seconds", "scheduler_loop_cpu_seconds"})
STATES = frozenset(  # keys of SystemStatus.counters that are no totals
    (
        *(
            "running_requests",
            "paused_requests",
            "waiting_requests",
            "suspended_requests",
            "compiling_requests",
            "waiting_tokens",
        ),
        *("used_tokens", "evictable_tokens", "max_total_tokens", "token_usage", "gen_throughput"),
        *("cache_hit_rate", "tree_nodes", "new_token_ratio", "pinned_tokens", "grammar_cache_bytes"),
    )
)


TENANT_COUNTERS = (
    ("requests", "HTTP requests that came in"),
    ("rejected", "Requests beyond a rate or a token budget"),
    ("prompt_tokens", "Prompt tokens"),
    ("cached_tokens", "Prompt tokens found in the radix cache"),
    ("output_tokens", "Generated tokens"),
)


class _Collector:
    def __init__(self, collect: Callable[[], Iterator[Metric]]) -> None:
        self.collect = collect


class Exposition:
    """Metrics over the frontend's picture; `text()` is the answer of /metrics."""

    def __init__(
        self, frontend: Frontend, measurements: Measurements, model_name: str, labels: CustomLabels | None = None
    ) -> None:
        self._custom = labels or CustomLabels()
        self._frontend = frontend
        self._measurements = measurements
        self._labels = {"model_name": model_name}

    def text(self, tenant: str = "") -> bytes:
        """With `tenant`, the use of this one alone."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(lambda: self.collect(tenant)))
        return generate_latest(registry)

    def collect(self, tenant: str = "") -> Iterator[Metric]:
        status = self._frontend.status
        load = Load.of(status if self._frontend.fresh else None)
        yield from self._gauges(load)
        yield from self._counters(status)
        services = status.services if status is not None else ()
        yield from self._histograms(services)
        yield from self._doors(services)
        yield from _tenants(status, self._labels, tenant)
        yield from _workers(status, self._labels)
        yield from _services(services, self._labels)

    def _gauges(self, load: Load) -> Iterator[Metric]:
        values = (
            ("num_running_reqs", "requests_running", "Requests in a batch", load.running),
            ("num_queue_reqs", "requests_waiting", "Requests waiting", load.waiting),
            ("num_used_tokens", "kv_used_tokens", "Tokens held by running requests", load.used_tokens),
            ("token_usage", "kv_usage", "Share of the KV pool held by running requests", load.usage),
            ("max_total_num_tokens", "kv_capacity_tokens", "Size of the KV pool", load.capacity),
            ("gen_throughput", "generation_tokens_per_second", "Generated tokens per second", load.throughput),
            ("cache_hit_rate", "cache_hit_rate", "Share of prompt tokens found in the cache", load.hit_rate),
            ("num_retracted_reqs", "requests_suspended", "Requests suspended now", load.suspended),
            ("num_paused_reqs", "", "Requests paused now", load.paused),
            ("engine_startup_time", "", "Seconds until the slowest worker was ready", load.startup_seconds),
            ("engine_load_weights_time", "", "Seconds of it for the weights", load.load_weights_seconds),
            ("num_grammar_queue_reqs", "", "Requests waiting for a grammar", load.compiling),
            ("spec_accept_length", "", "Accepted draft tokens per step", 0.0),
            ("spec_accept_rate", "", "Accepted share of draft tokens", 0.0),
            ("utilization", "", "Running requests over seats", load.utilization),
            ("new_token_ratio", "", "Share of the tokens still to come for which room is kept", load.kept_share),
            ("is_cuda_graph", "", "Whether steps are replayed as CUDA graphs", load.cuda_graph),
            ("", "kv_free_tokens", "Free tokens of the KV pool", load.free_tokens),
            ("", "kv_cached_tokens", "Tokens held by the radix tree alone", load.cached_tokens),
            ("", "workers_ready", "Workers that take requests", load.workers),
        )
        for theirs, ours, text, value in values:
            if theirs:
                yield _gauge(f"sglang:{theirs}", text, self._labels, value)
            if ours:
                yield _gauge(f"radixfleet_{ours}", text, self._labels, value)

    def _counters(self, status: SystemStatus | None) -> Iterator[Metric]:
        counters: Mapping[str, float] = status.counters if status is not None else {}
        for ours, theirs, text, key in COUNTERS:
            value = counters.get(key, 0.0)
            yield _counter(f"radixfleet_{ours}", text, self._labels, value)
            if theirs:
                yield _counter(f"sglang:{theirs}", text, self._labels, value)
        for name, text, key, labels in SEED_COUNTERS:
            yield _counter(name, text, labels, counters.get(key, 0.0))
        known = {key for *_, key in COUNTERS}
        for key in sorted(counters.keys() - known - STATES):
            yield _counter(f"radixfleet_scheduler_{key}", f"Scheduler: {key}", self._labels, counters[key])
        for key in sorted(counters.keys() & STATES):
            yield _gauge(f"radixfleet_scheduler_{key}", f"Scheduler: {key}", self._labels, counters[key])

    def _histograms(self, services: Iterable[ServiceMetrics]) -> Iterator[Metric]:
        """Sums over all processes of a kind; our own numbers are the live ones."""
        services = list(services)
        own = self._measurements.snapshots()
        for name, kind, key in HISTOGRAMS:
            parts = [own[name]] if name in own else []
            for service in services:
                is_self = service.service_id == self._frontend.service_id
                if service.service == kind and not is_self and key in service.histograms:
                    parts.append(service.histograms[key])
            bounds = FINE_BUCKETS if name in FINE else BUCKETS
            total = [sum(column) for column in zip(*parts, strict=True)] or [0.0] * (len(bounds) + 2)
            for prefix in ("radixfleet_",) if name in FINE else ("sglang:", "radixfleet_"):
                yield _histogram(prefix + name, self._labels, total, bounds)

    def _doors(self, services: Iterable[ServiceMetrics]) -> Iterator[Metric]:
        """What every HTTP process has done, whichever of them is asked; our own numbers are the live ones."""
        doors = {s.service_id: s.gauges for s in services if s.service == "tokenizer"}
        doors[self._frontend.service_id] = self._measurements.gauges()
        names = [*self._labels, "service_id"]
        active = GaugeMetricFamily("radixfleet_http_requests_active", "HTTP requests in work", labels=names)
        total = CounterMetricFamily("radixfleet_http_requests", "HTTP requests", labels=names)
        responses = CounterMetricFamily("radixfleet_http_responses", "HTTP responses", labels=[*names, "status"])
        for service_id, gauges in sorted(doors.items()):
            labels = [*self._labels.values(), service_id]
            active.add_metric(labels, gauges.get("http_requests_active", 0.0))
            total.add_metric(labels, gauges.get("http_requests", 0.0))
            for name in sorted(gauges):
                if name.startswith(RESPONSES):
                    responses.add_metric([*labels, name.removeprefix(RESPONSES)], gauges[name])
        yield from (active, total, responses)
        labels_up = {**self._labels, "service_id": self._frontend.service_id}
        fresh = float(self._frontend.fresh)
        yield from self._custom.collect(labels_up)
        yield _gauge("radixfleet_scheduler_up", "Whether the scheduler is heard", labels_up, fresh)


def _workers(status: SystemStatus | None, labels: Mapping[str, str]) -> Iterator[Metric]:
    names = ("ready", "running", "pages_free", "pages_cached", "num_pages", "inflight_steps", "heartbeat_age_s")
    totals = ("cached_tokens", "computed_tokens", "decoded_tokens")
    workers = status.workers if status is not None else ()
    for name in names:
        gauge = GaugeMetricFamily(f"radixfleet_worker_{name}", f"Worker: {name}", labels=[*labels, "worker"])
        for worker in workers:
            gauge.add_metric([*labels.values(), worker.worker_id], float(getattr(worker, name)))
        yield gauge
    for name in totals:
        counter = CounterMetricFamily(f"radixfleet_worker_{name}", f"Worker: {name}", labels=[*labels, "worker"])
        for worker in workers:
            counter.add_metric([*labels.values(), worker.worker_id], float(getattr(worker, name)))
        yield counter


def _tenants(status: SystemStatus | None, labels: Mapping[str, str], only: str) -> Iterator[Metric]:
    """What every tenant has used; its name is the label, so there are as many as names of keys."""
    tenants = [tenant for tenant in (status.tenants if status is not None else ()) if only in ("", tenant.name)]
    if not tenants:
        return
    names = [*labels, "tenant"]
    for name, text in TENANT_COUNTERS:
        counter = CounterMetricFamily(f"radixfleet_tenant_{name}", text, labels=names)
        for tenant in tenants:
            counter.add_metric([*labels.values(), tenant.name], float(getattr(tenant, name)))
        yield counter
    live = GaugeMetricFamily("radixfleet_tenant_requests_live", "Requests running or waiting", labels=names)
    for tenant in tenants:
        live.add_metric([*labels.values(), tenant.name], float(tenant.live))
    yield live


def _services(services: Iterable[ServiceMetrics], labels: Mapping[str, str]) -> Iterator[Metric]:
    """What every process says of itself in its heartbeat, under the name it uses."""
    families: dict[str, GaugeMetricFamily] = {}
    for service in services:
        for name, value in {**service.gauges, "heartbeat_age_seconds": service.heartbeat_age_s}.items():
            if not name.isidentifier() or name.startswith(RESPONSES):
                continue
            family = families.setdefault(
                name,
                GaugeMetricFamily(
                    f"radixfleet_service_{name}", f"Heartbeat: {name}", labels=[*labels, "service", "service_id"]
                ),
            )
            family.add_metric([*labels.values(), service.service, service.service_id], value)
    yield from families.values()


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _histogram(name: str, labels: Mapping[str, str], snapshot: list[float], bounds: Sequence[float]) -> Metric:
    """`snapshot` as shared.metrics.Histogram gives it."""
    family = HistogramMetricFamily(name, name.replace("_", " "), labels=list(labels))
    names = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    buckets = list(zip(names, snapshot[:-1], strict=True))
    family.add_metric(list(labels.values()), buckets, snapshot[-1])
    return family
