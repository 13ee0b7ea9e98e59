"""Who works: hellos, incarnations, credits, steps on their way, silence. Leaves what to compute to the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import msgspec
import structlog

from services.scheduler.edge import Edge
from services.scheduler.inflight import InflightStep
from services.scheduler.worker import Worker
from shared import ints
from shared.clock import Clock
from shared.config import SchedulerConfig
from shared.messages.base import PROTOCOL_VERSION
from shared.messages.control import Heartbeat, Ping
from shared.messages.step import Drain, StepResult, WorkerHello, WorkerReset, WorkerWelcome
from shared.transport import PeerBusy, PeerGone

log = structlog.get_logger(__name__)

MAX_REMEMBERED = 4096
_SAME_IN_A_FLEET = ("model_digest", "vocab_size", "kv_dtype", "kv_layout", "kv_bytes_per_page")


class Fleet:
    """`on_join(worker)` and `on_lost(worker, blame)` tell the scheduler; a lost worker is in the fleet no more."""

    def __init__(
        self,
        edge: Edge,
        config: SchedulerConfig,
        epoch: int,
        clock: Clock,
        on_join: Callable[[Worker], None],
        on_lost: Callable[[Worker, bool], None],
    ) -> None:
        self.workers: dict[bytes, Worker] = {}
        self.model: WorkerHello | None = None  # the first worker's; every other one must be like it
        self.changed_at = clock.now()
        self._edge = edge
        self._config = config
        self._epoch = epoch
        self._clock = clock
        self._on_join = on_join
        self._on_lost = on_lost
        self._dropped: dict[bytes, None] = {}  # identities that are never welcome again
        self._left: dict[bytes, None] = {}  # identities that were let go in peace

    def __iter__(self) -> Iterator[Worker]:
        return iter(list(self.workers.values()))

    def __len__(self) -> int:
        return len(self.workers)

    def __contains__(self, worker: Worker) -> bool:
        return self.workers.get(worker.identity) is worker

    @property
    def max_request_tokens(self) -> int:
        return max((worker.max_request_tokens for worker in self.workers.values()), default=0)

    def with_credit(self) -> Iterable[Worker]:
        return [worker for worker in self.workers.values() if worker.has_credit]

    # Joining

    def hello(self, identity: bytes, message: WorkerHello) -> None:
        if identity in self.workers:
            return  # it repeats itself until the welcome arrives
        former = [worker for worker in self if worker.worker_id == message.worker_id]
        if identity in self._dropped or any(w.hello.incarnation >= message.incarnation for w in former):
            self.answer(identity, WorkerReset(self._epoch, "this incarnation was given up"))
            return
        refusal = self._refusal(message)
        if refusal:
            log.error("worker refused", worker=message.worker_id, reason=refusal)
            self._remember(self._dropped, identity)
            self.answer(identity, WorkerReset(self._epoch, refusal, fatal=True))
            return
        for other in former:
            self.drop(other, "has a new incarnation")
        self._welcome(identity, message)

    def _welcome(self, identity: bytes, message: WorkerHello) -> None:
        if not self.answer(identity, WorkerWelcome(self._epoch)):
            return
        config = self._config
        step_tokens = message.max_batched_tokens
        if config.chunked_prefill_size > 0:
            step_tokens = min(step_tokens, config.chunked_prefill_size)
        # Every seat may need its token in every step.
        seats = min(message.max_slots, step_tokens, config.max_running_requests or message.max_slots)
        depth = min(message.max_inflight_steps, config.max_inflight_steps or message.max_inflight_steps)
        worker = Worker(identity, message, depth, seats, step_tokens, self._clock.now())
        worker.max_drafts = self._most_drafts(message)
        worker.keeps_hidden = message.keeps_hidden and not self._config.disable_radix_cache
        self.model = self.model or message
        self.workers[identity] = worker
        self.changed_at = self._clock.now()
        self._on_join(worker)
        log.info(
            "worker joined",
            worker=worker.key,
            model=message.model,
            device=message.device,
            pages=message.num_pages,
            slots=seats,
            step_tokens=step_tokens,
            run_ahead=depth,
        )

    def _most_drafts(self, hello: WorkerHello) -> int:
        most = max(hello.max_drafts, 0) if self._config.speculative_algorithm == "ngram" else 0
        return min(most, self._config.speculative_num_draft_tokens or most)

    def _refusal(self, hello: WorkerHello) -> str:
        if hello.protocol != PROTOCOL_VERSION:
            return f"protocol {hello.protocol}, here it is {PROTOCOL_VERSION}"
        if hello.page_size != self._config.page_size:
            return f"page size {hello.page_size}, here it is {self._config.page_size}"
        small = [
            n for n in ("max_slots", "max_batched_tokens", "max_context", "max_inflight_steps") if getattr(hello, n) < 1
        ]
        if small or hello.num_pages < 2:
            return f"too small: {', '.join(small) or 'num_pages'}"
        for name in _SAME_IN_A_FLEET if self.model else ():
            ours, theirs = getattr(self.model, name), getattr(hello, name)
            if ours != theirs:
                return f"{name} is {theirs}, in this fleet it is {ours}"
        return ""

    # Being there

    def known(self, identity: bytes, incarnation: int | None = None) -> Worker | None:
        """The worker behind a message. Whoever is not in the fleet is told to start over."""
        worker = self.workers.get(identity)
        if worker is not None and incarnation in (None, worker.hello.incarnation):
            worker.last_heard = self._clock.now()
            return worker
        if worker is not None:
            self.drop(worker, f"speaks as incarnation {incarnation}")
        elif identity not in self._left:
            self.answer(identity, WorkerReset(self._epoch, "not part of the fleet: say hello with a new incarnation"))
        return None

    def heartbeat(self, identity: bytes, message: Heartbeat) -> None:
        worker = self.known(identity, message.incarnation)
        if worker is not None:
            worker.heartbeat = message

    def take_result(self, worker: Worker, result: StepResult) -> InflightStep | None:
        """The step whose result this is. A gap is never guessed about: the worker starts over."""
        step = worker.inflight[0] if worker.inflight else None
        if result.epoch != self._epoch:
            problem = f"result of epoch {result.epoch}"
        elif step is None or result.step_id != step.step_id:
            problem = f"result of step {result.step_id}, owed is {step.step_id if step else 'none'}"
        elif ints.count(result.token_ids) != step.num_samples or len(result.token_ids) % ints.ITEM_BYTES:
            problem = f"step {result.step_id} has {len(result.token_ids)} bytes for {step.num_samples} samples"
        else:
            worker.inflight.popleft()
            worker.head_since = self._clock.now()
            return step
        self.drop(worker, problem)
        return None

    def send(self, worker: Worker, message: msgspec.Struct, *frames: bytes | memoryview) -> bool:
        """To a worker of the fleet, after the orders that must arrive before anything else.

        One that cannot take it is lost: credits stay far below its queue.
        """
        try:
            while worker.orders:
                self._edge.send(worker.identity, worker.orders.popleft())
            self._edge.send(worker.identity, message, *frames)
        except PeerGone:
            self.drop(worker, "connection lost")
            return False
        except PeerBusy:
            self.drop(worker, "does not read its messages")
            return False
        return True

    # Leaving

    def probe(self) -> None:
        """Some connection has broken: find out whose."""
        for worker in self:
            self.send(worker, Ping(0))

    def check_silence(self) -> None:
        """Drop whoever has not been heard of or computes one step for too long."""
        now = self._clock.now()
        for worker in self:
            step_age = now - worker.head_since if worker.inflight else 0.0
            if worker.heartbeat is not None and worker.inflight:
                step_age = max(step_age, worker.heartbeat.step_age_ms / 1e3)
            if now - worker.last_heard > self._config.heartbeat_timeout:
                self.drop(worker, f"silent for {now - worker.last_heard:.1f} s")
            elif step_age > self._config.step_timeout:
                self.drop(worker, f"one step has taken {step_age:.0f} s")

    def drop(self, worker: Worker, reason: str, *, blame: bool = True) -> None:
        """The worker is lost: forget its steps, and never believe this incarnation again."""
        if self.workers.pop(worker.identity, None) is None:
            return
        log.warning("worker lost", worker=worker.key, reason=reason, running=len(worker.running))
        self._remember(self._dropped, worker.identity)
        self.changed_at = self._clock.now()
        self.answer(worker.identity, WorkerReset(self._epoch, reason))
        self._on_lost(worker, blame)

    def let_go(self, worker: Worker, deadline_s: float) -> None:
        """A worker that wanted to leave and has nothing left to do."""
        if self.workers.pop(worker.identity, None) is None:
            return
        log.info("worker left", worker=worker.key)
        self._remember(self._dropped, worker.identity)
        self._remember(self._left, worker.identity)
        self.changed_at = self._clock.now()
        self.answer(worker.identity, Drain(deadline_s))
        self._on_lost(worker, False)

    @staticmethod
    def _remember(book: dict[bytes, None], identity: bytes) -> None:
        book[identity] = None
        if len(book) > MAX_REMEMBERED:
            del book[next(iter(book))]

    def answer(self, identity: bytes, message: msgspec.Struct) -> bool:
        """To anybody, known or not. False where it cannot be delivered."""
        try:
            self._edge.send(identity, message)
        except (PeerGone, PeerBusy):
            return False
        return True
