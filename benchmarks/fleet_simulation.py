"""A fleet in virtual time: real schedulers, workers that compute nothing, conversations, and routers to compare with.

Everything runs in one thread on one clock that jumps from event to event, so a machine's load changes nothing but how
long the benchmark takes. Leaves tables to `fleet`.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from services.scheduler.core import Edges
from services.scheduler.scheduler import Scheduler
from shared import ints
from shared.clock import ManualClock
from shared.config import SchedulerConfig
from shared.messages.control import Heartbeat, Hello, Ping, Pong
from shared.messages.kv import KvCancel, KvDone, KvReady, KvReceive, KvSend
from shared.messages.request import GenerateRequest, SamplingParams, StreamAck
from shared.messages.step import StepCommand, StepResult, WorkerHello
from shared.messages.stream import StreamOpen, TokenChunks

VOCAB = 32_000
PAGE_SIZE = 16
BEAT_S = 0.5


@dataclass(frozen=True)
class Machine:
    """What a worker can do; the defaults are about an 8B model on one GPU."""

    pages: int = 4096
    slots: int = 64
    step_tokens: int = 2048
    step_s: float = 0.006
    prefill_token_s: float = 50e-6
    decode_row_s: float = 20e-6
    page_bytes: int = 2 << 20
    link_bytes_per_s: float = 5e9
    link_delay_s: float = 0.002
    transfers: bool = True


class Simulation:
    """The clock and what is due."""

    def __init__(self) -> None:
        self.clock = ManualClock(1000.0)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, work: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.clock.now() + seconds, next(self._numbers), work))

    def run(self, done: Callable[[], bool]) -> float:
        """Until `done`; returns the virtual seconds it took."""
        started = self.clock.now()
        while self._due and not done():
            at, _, work = heapq.heappop(self._due)
            self.clock.advance(max(0.0, at - self.clock.now()))
            work()
        return self.clock.now() - started


class _Wire:
    """One edge of a scheduler: messages are handed on in the same moment."""

    def __init__(self, deliver: Callable[[bytes, Any], None]) -> None:
        self._deliver = deliver

    def send(self, identity: bytes, message: Any, *frames: Any) -> None:
        self._deliver(identity, message)


class SimWorker:
    """Executes its commands in order, each in the time the machine takes for it."""

    def __init__(self, cell: Cell, name: str) -> None:
        machine = cell.machine
        self.hello = WorkerHello(
            name, 1, "none", "none", PAGE_SIZE, machine.pages, machine.slots, machine.step_tokens, 32_768, 2, VOCAB,
            "none", "none", "none", machine.page_bytes, 1, (f"sim://{name}",) if machine.transfers else (),
        )  # fmt: skip
        self._cell = cell
        self._queue: list[StepCommand] = []
        self._tokens = random.Random(name)

    def receive(self, message: Any) -> None:
        if isinstance(message, StepCommand):
            self._queue.append(message)
            if len(self._queue) == 1:
                self._begin()
        elif isinstance(message, KvReceive):
            self._reply(self._cell.machine.link_delay_s / 2, KvReady(message.transfer_id, 1))
        elif isinstance(message, KvSend):
            self._send_pages(message)
        elif isinstance(message, KvCancel):
            self._reply(0.0, KvDone(message.transfer_id, 1, "received", ok=False))
        elif isinstance(message, Ping):
            self._reply(0.0, Pong(message.nonce))

    def _begin(self) -> None:
        machine, command = self._cell.machine, self._queue[0]
        prefill = sum(len(row.token_ids) // 4 for row in command.prefills)
        rows = len(command.decode_slots) // 4
        seconds = machine.step_s + prefill * machine.prefill_token_s + rows * machine.decode_row_s
        self._cell.simulation.after(seconds, lambda: self._finish(seconds))

    def _finish(self, seconds: float) -> None:
        command = self._queue.pop(0)
        samples = len(command.decode_slots) // 4 + sum(row.sample for row in command.prefills)
        tokens = ints.pack([self._tokens.randrange(VOCAB) for _ in range(samples)])
        if self._queue:
            self._begin()
        result = StepResult(command.step_id, self._cell.epoch, 1, tokens, forward_ms=seconds * 1e3)
        self._cell.from_worker(self.hello.worker_id, result)

    def _send_pages(self, order: KvSend) -> None:
        machine = self._cell.machine
        num_bytes = len(order.pages) // 4 * machine.page_bytes
        seconds = machine.link_delay_s + num_bytes / machine.link_bytes_per_s
        self._cell.moved_bytes += num_bytes
        self._reply(seconds, KvDone(order.transfer_id, 1, "sent", ok=True))
        done = KvDone(order.transfer_id, 1, "received", ok=True)
        self._cell.simulation.after(seconds, lambda: self._cell.from_worker(order.target_id, done))

    def _reply(self, seconds: float, message: Any) -> None:
        self._cell.simulation.after(seconds, lambda: self._cell.from_worker(self.hello.worker_id, message))


class Cell:
    """One scheduler with its workers and one frontend. `cpu` is what its turns cost in real seconds."""

    def __init__(self, simulation: Simulation, names: list[str], machine: Machine, epoch: int = 7) -> None:
        self.simulation = simulation
        self.machine = machine
        self.epoch = epoch
        self.cpu = 0.0
        self.moved_bytes = 0
        self.outputs: dict[str, list[int]] = {}
        self.done: dict[str, Callable[[list[int]], None]] = {}
        self.workers = {name: SimWorker(self, name) for name in names}
        edges = Edges(_Wire(lambda *_: None), _Wire(self._to_detokenizer), _Wire(self._to_worker))
        self._scheduler = Scheduler(SchedulerConfig(page_size=PAGE_SIZE), epoch, edges, simulation.clock)
        self._due = False
        self.core = self._scheduler.core
        # As after the first transfers: the scheduler's first guess is another link.
        self.core.migration.rates.bytes_per_s = machine.link_bytes_per_s
        self.core.migration.rates.delay_s = machine.link_delay_s
        self._beat()

    @property
    def counters(self) -> dict[str, int]:
        return self.core.metrics.counters

    def submit(self, rid: str, prompt: bytes, max_tokens: int, done: Callable[[list[int]], None]) -> None:
        self.done[rid] = done
        self.outputs[rid] = []
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self._post("tokenizer", "t/1", GenerateRequest(rid, "t/1", prompt, params))

    def from_worker(self, name: str, message: Any) -> None:
        self._post("worker", f"{name}/1", message)

    def _beat(self) -> None:
        self._post("tokenizer", "t/1", Hello("tokenizer", "t", 1))
        self._post("detokenizer", "d/1", Hello("detokenizer", "d", 1, "sim://d"))
        for name, worker in self.workers.items():
            known = f"{name}/1".encode() in self.core.fleet.workers
            self.from_worker(name, Heartbeat(name, 1) if known else worker.hello)
        self.simulation.after(BEAT_S, self._beat)

    def _post(self, edge: str, identity: str, message: Any) -> None:
        self._scheduler.receive(getattr(self._scheduler.handlers, f"from_{edge}"), identity.encode(), message)
        if not self._due:
            self._due = True
            self.simulation.after(0.0, self._turn)

    def _turn(self) -> None:
        self._due = False
        started = time.thread_time()
        self._scheduler.turn()
        self.cpu += time.thread_time() - started

    def _to_worker(self, identity: bytes, message: Any) -> None:
        self.workers[identity.decode().partition("/")[0]].receive(message)

    def _to_detokenizer(self, identity: bytes, message: Any) -> None:
        if isinstance(message, StreamOpen):
            self.outputs[message.request_id] = ints.unpack(message.output_ids).tolist()
        elif isinstance(message, TokenChunks):
            for chunk in message.chunks:
                self.outputs[chunk.request_id] += ints.unpack(chunk.token_ids).tolist()
                if chunk.finish is not None:
                    self._post("tokenizer", "t/1", StreamAck((chunk.request_id,)))
                    self.done.pop(chunk.request_id)(self.outputs.pop(chunk.request_id))


@dataclass
class Conversations:
    """Closed-loop chats: each waits for its answer, thinks, and sends the whole history with something new."""

    simulation: Simulation
    submit: Callable[[str, bytes, int, Callable[[list[int]], None]], None]
    count: int
    turns: int = 5
    system_prompts: int = 8
    system_tokens: int = 512
    think_s: float = 1.0
    seed: int = 1
    tokens_out: int = 0
    finished: int = 0
    first: float = 0.0
    latencies: list[float] = field(default_factory=list)

    def start(self) -> None:
        rng = random.Random(self.seed)
        systems = [rng.choices(range(VOCAB), k=self.system_tokens) for _ in range(self.system_prompts)]
        for number in range(self.count):
            own = random.Random(self.seed * 1_000_003 + number)
            history = list(rng.choice(systems))
            self.simulation.after(own.uniform(0, 4), lambda o=own, h=history, n=number: self._ask(n, o, h, self.turns))

    def _ask(self, number: int, rng: random.Random, history: list[int], left: int) -> None:
        history += rng.choices(range(VOCAB), k=rng.randint(32, 192))
        length = rng.randint(32, 160)
        asked = self.simulation.clock.now()

        def answered(output: list[int]) -> None:
            self.tokens_out += len(output)
            self.latencies.append((self.simulation.clock.now() - asked) / len(output))
            history.extend(output)
            if left == 1:
                self.finished += 1
                return
            pause = rng.expovariate(1 / self.think_s)
            self.simulation.after(pause, lambda: self._ask(number, rng, history, left - 1))

        self.submit(f"{number}-{left}", ints.pack(history), length, answered)
