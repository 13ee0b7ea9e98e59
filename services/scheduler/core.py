"""The scheduler's parts, put together, and the events that concern several of them. Leaves messages to handlers."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.compiling import Compiling
from services.scheduler.door import Door
from services.scheduler.drafting import Drafting
from services.scheduler.edge import Edge
from services.scheduler.fleet import Fleet
from services.scheduler.frontends import Frontends
from services.scheduler.kv_events import KvEvents
from services.scheduler.leading import Leading
from services.scheduler.lifecycle import Lifecycle, abort, error
from services.scheduler.masking import Masking, Post
from services.scheduler.metrics import Metrics
from services.scheduler.migration import MIN_DEADLINE_S, Migration
from services.scheduler.names import Names
from services.scheduler.operations import Operations
from services.scheduler.outbox import Detokenizer, Outbox
from services.scheduler.pins import Pins
from services.scheduler.placement import Placement
from services.scheduler.planner import Planner
from services.scheduler.radix_tree import RadixTree
from services.scheduler.request import Request
from services.scheduler.seats import Seats
from services.scheduler.settle import Settler
from services.scheduler.status import StatusBoard
from services.scheduler.tenants import Tenants
from services.scheduler.tiers import Tiers
from services.scheduler.waiting import WaitingQueue
from services.scheduler.watch import Watch
from services.scheduler.worker import Worker
from shared.clock import Clock
from shared.config import SchedulerConfig
from shared.messages.stream import Finish, FinishReason
from shared.tenants import read_file

DRAIN_KV_SHARE = 0.5
"""Of the time a worker has to leave: for so long it may be kept for its pages alone."""


@dataclass(frozen=True)
class Edges:
    tokenizers: Edge
    detokenizers: Edge
    workers: Edge


class Core:
    def __init__(self, config: SchedulerConfig, epoch: int, edges: Edges, clock: Clock, post: Post) -> None:
        self.config = config
        self.epoch = epoch
        self.clock = clock
        self.metrics = Metrics(clock, config.decode_log_interval)
        self.tree = RadixTree(config.page_size, enabled=not config.disable_radix_cache)
        self.kv_events: KvEvents | None = None  # set, before workers join, where somebody wants them
        self.pins = Pins(self.tree, clock)
        self.seats = Seats(self.tree, self.metrics, self.pins)
        self.outbox = Outbox(edges.detokenizers, epoch, self.metrics, clock)
        self.waiting = WaitingQueue(config.schedule_policy, config.ageing_seconds, self._longest_match)
        self.lifecycle = Lifecycle(self.seats, self.waiting, self.metrics, clock, self.outbox.touch)
        self.names = Names()
        self.tenants = Tenants(read_file(config.api_key_file) if config.api_key_file else (), clock)
        self.lifecycle.on_end = self._ended
        self.fleet = Fleet(edges.workers, config, epoch, clock, self._worker_joined, self._worker_lost)
        self.frontends = Frontends(edges.tokenizers, config.heartbeat_timeout, clock, self._tokenizer_lost)
        self.door = Door(
            config, self.waiting, self.fleet, self.lifecycle.requests, self.lifecycle.compiling, self.pins, clock
        )
        self.masking = Masking(self.fleet, self.lifecycle, self.metrics, clock, epoch, post)
        self.leading = Leading(self.masking, self.metrics, self.outbox.touch)
        self.compiling = Compiling(
            config.model_path, self.lifecycle, self.frontends, self.metrics, post, self._compiled, self._vocab_size
        )
        self.masking.check = self.compiling.check
        self._compose_deciders()

    def _compose_deciders(self) -> None:
        split = self.config.chunked_prefill_size >= 0
        timeout = self.config.transfer_timeout
        self.tiers = Tiers(self.tree, self.metrics)
        self.seats.keep = self.tiers.keep
        self.migration = Migration(
            self.tree,
            self.seats,
            self.fleet,
            self.metrics,
            self.clock,
            timeout,
            give_up=self._moved_in_vain,
            spoilt=self.tiers.empty,
            shortest=MIN_DEADLINE_S if self.config.recompute else timeout,
        )
        self.tiers.emptied = self.migration.cancel_all
        self.placement = Placement(
            self.tree,
            self.seats,
            self.waiting,
            self.fleet,
            self.clock,
            self.migration,
            recompute=self.config.recompute,
        )
        self.drafting = Drafting(self.tree, self.seats)
        self.planner = Planner(self.tree, self.seats, self.lifecycle, self.metrics, self.drafting, split_prompts=split)
        self.settler = Settler(self.seats, self.lifecycle, self.outbox, self.masking, self.metrics)
        self.board = StatusBoard(self)
        self.operations = Operations(self)
        self.watch = Watch(self)

    # Events

    def enter(self, request: Request) -> None:
        """It was let in."""
        self.names.add(request)
        self.tenants.admitted(request)

    def _ended(self, request: Request) -> None:
        self.names.discard(request)
        self.tenants.ended(request)
        self.drafting.remember(request)

    def forget(self, request: Request) -> None:
        """Nobody will ask about it again."""
        self.lifecycle.forget(request)
        self.outbox.forget(request)

    def lose_detokenizer(self, detokenizer: Detokenizer, reason: str) -> None:
        self.outbox.lose(detokenizer, self.lifecycle.requests.values(), reason)

    def probe_detokenizers(self) -> None:
        for detokenizer in self.outbox.probe():
            self.lose_detokenizer(detokenizer, "connection lost")

    def drain_worker(self, worker: Worker, deadline_s: float) -> None:
        """Give it nothing new; it is let go once it has nothing left."""
        now = self.clock.now()
        until, needed_until = now + deadline_s, now + deadline_s * DRAIN_KV_SHARE
        worker.drain_until = min(worker.drain_until, until) if worker.draining else until
        worker.needed_until = min(worker.needed_until, needed_until) if worker.draining else needed_until
        worker.draining = True

    def move_away(self) -> None:
        """Suspend the requests of leaving workers, where there is another worker or no time left."""
        for worker in self.fleet:
            if not worker.draining or not worker.running:
                continue
            if worker.drain_until <= self.clock.now() or any(not other.draining for other in self.fleet):
                worker.emigrants += worker.running.values()
                for request in list(worker.running.values()):
                    self.lifecycle.suspend(request)

    def let_drained_go(self) -> None:
        """Say goodbye to leaving workers that nobody needs any more."""
        for worker in self.fleet:
            if not worker.draining:
                continue
            left = worker.drain_until - self.clock.now()
            if left <= 0 or not (worker.running or worker.inflight or self._needed_for_its_pages(worker)):
                self.fleet.let_go(worker, max(left, 1.0))

    def _needed_for_its_pages(self, worker: Worker) -> bool:
        """Whether pages are on their way from it, or a request it had may still have its own moved."""
        worker.emigrants = [request for request in worker.emigrants if request.live and request.worker is None]
        heirs = any(not other.draining for other in self.fleet)
        if not heirs or not self.migration.possible or self.clock.now() >= worker.needed_until:
            return False
        return bool(worker.transfers or worker.emigrants)

    def resume(self, request: Request) -> None:
        """A request that was taken over with tokens: its last one may have ended it before its scheduler was lost."""
        last = request.output[-1]
        if last in request.stops and len(request.output) > request.min_tokens:
            self.masking.end(request, Finish(FinishReason.STOP, matched_token=last))
        elif len(request.output) < request.max_tokens:
            return
        elif request.guide is not None:
            self.masking.judge(request)
        else:
            self.lifecycle.finish(request, Finish(FinishReason.LENGTH))

    def _compiled(self, request: Request) -> None:
        if request.output:
            self.resume(request)

    def _vocab_size(self) -> int:
        return self.fleet.model.vocab_size if self.fleet.model else 0

    def _worker_joined(self, worker: Worker) -> None:
        self.tree.add_worker(worker.key)
        self.tiers.join(worker)

    def _worker_lost(self, worker: Worker, blame: bool) -> None:
        if blame:
            self.metrics.count("workers_lost")
        self.lifecycle.lose_worker(worker, blame=blame)
        self.tree.drop_worker(worker.key)
        self.tiers.lose(worker)
        self.migration.lose_worker(worker)

    def _moved_in_vain(self, request: Request) -> None:
        """Its pages could not be brought: it computes what they would have held."""
        if not self.config.recompute:
            self.lifecycle.finish(request, error("pages could not be moved, and computing them again is switched off"))

    def _tokenizer_lost(self, identity: bytes) -> None:
        self.metrics.count("tokenizers_lost")
        for request in list(self.lifecycle.requests.values()):
            if request.frontend == identity:
                self.lifecycle.finish(request, abort("the frontend is gone"))

    def _longest_match(self, request: Request) -> int:
        hits = self.tree.match(request.namespace, request.tokens(0, request.match_limit())).hits
        return max((hit.num_tokens for hit in hits.values()), default=0)
