"""What the scheduler counts, and its two log lines; leaves exposition to the tokenizer."""

from __future__ import annotations

import time
from collections import Counter, deque

import structlog

from services.scheduler.inflight import StepPlan
from services.scheduler.request import Request
from services.scheduler.worker import UnloggedPrefills, Worker
from shared.clock import Clock
from shared.messages.stream import FinishReason
from shared.metrics import FINE_BUCKETS, Histogram

log = structlog.get_logger(__name__)

PREFILL_LOG_INTERVAL_S = 0.02
WINDOW_S = 60.0  # of the hit rate and the throughput

COUNTERS = (
    "cache_hit_tokens",
    "cache_miss_tokens",
    "prompt_tokens",
    "decode_tokens",
    "forced_tokens",
    "draft_tokens",
    "accepted_draft_tokens",
    "recomputed_tokens",
    "evicted_tokens",
    "retractions",
    "requests",
    "constrained_requests",
    "requests_finished",
    "requests_aborted",
    "requests_failed",
    "requests_rejected",
    "steps",
    "prefill_steps",
    "workers_lost",
    "detokenizers_lost",
    "tokenizers_lost",
    "transfers",
    "transfers_failed",
    "transferred_tokens",
    "transferred_bytes",
    "host_stored_tokens",
    "host_reloaded_tokens",
    "disk_stored_tokens",
    "disk_reloaded_tokens",
    "tiers_emptied",
    "internal_errors",
    "invariant_violations",
)


class Metrics:
    def __init__(self, clock: Clock, decode_log_interval: int) -> None:
        self.counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self.queue_time = Histogram()
        self.mask_time = Histogram(FINE_BUCKETS)  # of filling one step's masks
        self.mask_row_time = Histogram(FINE_BUCKETS)  # of one row of them: a token
        self.mask_wait = Histogram(FINE_BUCKETS)  # of a worker, for them
        self.loop_cpu = Histogram(FINE_BUCKETS)  # of the loop's thread, from the end of one turn to that of the next
        self.turns = 0
        self._clock = clock
        self._decode_log_interval = decode_log_interval
        self._samples: deque[tuple[float, int, int, int]] = deque()  # time, hits, misses, decoded

    def count(self, name: str, amount: int = 1) -> None:
        self.counters[name] += amount

    def admitted(self, request: Request, num_computed: int) -> None:
        """A request has got a seat; `num_computed` of its tokens need not be computed."""
        if not request.admitted:
            request.admitted = True
            request.cached_tokens = min(num_computed, request.prompt_length)
            self.queue_time.observe(self._clock.now() - request.arrival)
            self.count("prompt_tokens", request.prompt_length)
            self.count("cache_hit_tokens", request.cached_tokens)
            self.count("cache_miss_tokens", request.prompt_length - request.cached_tokens)
        else:
            self.count("recomputed_tokens", request.known - num_computed)

    def finished(self, request: Request) -> None:
        assert request.finish is not None
        names = {FinishReason.ABORT: "requests_aborted", FinishReason.ERROR: "requests_failed"}
        self.count(names.get(request.finish.reason, "requests_finished"))

    def gauges(self) -> dict[str, float]:
        """Of this process itself."""
        return {"cpu_seconds": time.process_time(), "turns": float(self.turns)}

    def sample(self) -> None:
        """Remember where the counters stand; called about once a second."""
        now = self._clock.now()
        c = self.counters
        self._samples.append((now, c["cache_hit_tokens"], c["cache_miss_tokens"], c["decode_tokens"]))
        while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()

    def rates(self) -> tuple[float, float]:
        """(cache hit rate over the window, decoded tokens per second over the last seconds)."""
        if len(self._samples) < 2:
            return 0.0, 0.0
        last = self._samples[-1]
        first = self._samples[0]
        hits, misses = last[1] - first[1], last[2] - first[2]
        before = self._samples[max(0, len(self._samples) - 6)]
        seconds = last[0] - before[0]
        throughput = (last[3] - before[3]) / seconds if seconds > 0 else 0.0
        return hits / (hits + misses) if hits + misses else 0.0, throughput

    def log_step(self, worker: Worker, plan: StepPlan, usage: float, queued: int) -> None:
        """One line per step with a prefill, one per `decode_log_interval` steps with decode rows."""
        drafts = sum(chunk.drafts > 0 for chunk in plan.chunks)
        if len(plan.chunks) > drafts:
            unlogged = worker.unlogged
            unlogged.sequences += len(plan.chunks) - drafts
            unlogged.new_tokens += plan.prefill_tokens
            unlogged.cached_tokens += plan.cached_tokens
            unlogged.usage, unlogged.running, unlogged.queued = usage, len(plan.decode), queued
            self.log_prefills(worker)
        if not plan.decode and not drafts:
            return
        worker.decode_steps += 1
        if worker.decode_steps % self._decode_log_interval:
            return
        now = self._clock.now()
        seconds = now - worker.logged_at
        rate = (worker.decoded_tokens - worker.tokens_at_log) / seconds if seconds > 0 else 0.0
        worker.tokens_at_log, worker.logged_at = worker.decoded_tokens, now
        used = sum(request.dispatched for request in worker.running.values())
        log.info(
            f"Decode batch, #running-req: {len(worker.running)}, #token: {used}, token usage: {usage:.2f}, "
            f"gen throughput (token/s): {rate:.1f}, #queue-req: {queued}",
            worker=worker.worker_id,
        )

    def log_prefills(self, worker: Worker) -> None:
        """Steps that follow each other faster than anybody reads share a line."""
        unlogged, now = worker.unlogged, self._clock.now()
        if not unlogged.sequences or now - worker.prefill_logged_at < PREFILL_LOG_INTERVAL_S:
            return
        log.info(
            f"Prefill batch, #new-seq: {unlogged.sequences}, #new-token: {unlogged.new_tokens}, "
            f"#cached-token: {unlogged.cached_tokens}, token usage: {unlogged.usage:.2f}, "
            f"#running-req: {unlogged.running}, #queue-req: {unlogged.queued}",
            worker=worker.worker_id,
        )
        worker.unlogged = UnloggedPrefills()
        worker.prefill_logged_at = now
