"""The real scheduler between peers that live in the same thread: no sockets, no time but the test's own."""

from __future__ import annotations

import random
from typing import Any

from services.scheduler.core import Edges
from services.scheduler.request import Request
from services.scheduler.scheduler import Handler, Scheduler
from shared import ints
from shared.clock import ManualClock
from shared.config import SchedulerConfig
from shared.messages.control import Heartbeat, Hello
from shared.messages.edges import ToDetokenizer, ToTokenizer, ToWorker
from shared.messages.kv import KvDone, KvReady, KvStored
from shared.messages.request import (
    AbortRequest,
    GenerateRequest,
    Operation,
    OperationDone,
    SamplingParams,
    StreamAck,
)
from tests.fake_model import VOCAB, generate
from tests.local_peers import LocalDetokenizer, LocalEdge, LocalTokenizer, LocalWorker, StreamRecord, worker_hello


class LocalFleet:
    EPOCH = 7
    ms_per_token = 0.0  # what its workers say a forward takes

    def __init__(self, *, workers: int = 1, hello: dict[str, Any] | None = None, **config: Any) -> None:
        self.clock = ManualClock(1000.0)
        self.tokenizer_edge = LocalEdge(ToTokenizer)
        self.detokenizer_edge = LocalEdge(ToDetokenizer)
        self.worker_edge = LocalEdge(ToWorker)
        edges = Edges(self.tokenizer_edge, self.detokenizer_edge, self.worker_edge)
        self.scheduler = Scheduler(SchedulerConfig(**config), self.EPOCH, edges, self.clock)
        self.scheduler.checking = True
        self.core = self.scheduler.core
        self.hello = hello or {}
        self.workers: dict[str, LocalWorker] = {}
        self.prompts: dict[str, list[int]] = {}
        self._count = 0
        self.tokenizer = self.add_tokenizer("t/1")
        self.detokenizer = self.add_detokenizer("d/1")
        for index in range(workers):
            self.add_worker(f"w{index}")

    # Peers

    def add_worker(self, worker_id: str, incarnation: int = 1, **changes: Any) -> LocalWorker:
        worker = LocalWorker(worker_hello(worker_id, incarnation, **{**self.hello, **changes}))
        worker.engine.ms_per_token = self.ms_per_token
        self.workers[worker.key] = worker
        self.worker_edge.peers[worker.key.encode()] = worker.receive
        self.from_worker(worker, worker.hello)
        return worker

    def add_detokenizer(self, key: str) -> LocalDetokenizer:
        detokenizer = LocalDetokenizer(key)
        self.detokenizer_edge.peers[key.encode()] = detokenizer.receive
        name, _, incarnation = key.partition("/")
        self.from_detokenizer(detokenizer, Hello("detokenizer", name, int(incarnation), f"ipc://{name}"))
        return detokenizer

    def add_tokenizer(self, key: str) -> LocalTokenizer:
        tokenizer = LocalTokenizer(key)
        self.tokenizer_edge.peers[key.encode()] = tokenizer.receive
        name, _, incarnation = key.partition("/")
        self.from_tokenizer(Hello("tokenizer", name, int(incarnation)), tokenizer)
        return tokenizer

    def from_tokenizer(self, message: Any, tokenizer: LocalTokenizer | None = None) -> None:
        self._post(self.scheduler.handlers.from_tokenizer, (tokenizer or self.tokenizer).key, message)

    def from_detokenizer(self, detokenizer: LocalDetokenizer, message: Any) -> None:
        self._post(self.scheduler.handlers.from_detokenizer, detokenizer.key, message)

    def from_worker(self, worker: LocalWorker, message: Any) -> None:
        self._post(self.scheduler.handlers.from_worker, worker.key, message)

    def _post(self, handler: Handler, key: str, message: Any) -> None:
        self.scheduler.receive(handler, key.encode(), message)

    def heartbeats(self) -> None:
        """Everybody says that it lives."""
        for worker in self.workers.values():
            if worker.key.encode() in self.worker_edge.peers:
                self.from_worker(worker, Heartbeat(worker.hello.worker_id, worker.hello.incarnation))
        for key in self.detokenizer_edge.peers:
            self.scheduler.receive(self.scheduler.handlers.from_detokenizer, key, Heartbeat(key.decode(), 1))
        for key in self.tokenizer_edge.peers:
            self.scheduler.receive(self.scheduler.handlers.from_tokenizer, key, Heartbeat(key.decode(), 1))

    def lose_worker(self, worker: LocalWorker) -> None:
        """The process dies and its connection breaks."""
        del self.worker_edge.peers[worker.key.encode()]
        del self.workers[worker.key]
        self.scheduler.disconnected(self.core.fleet.probe)

    # Work

    def submit(self, prompt: list[int], max_tokens: int = 8, *, rid: str = "", **fields: Any) -> str:
        rid = rid or f"r{self._count}"
        self._count += 1
        sampling_names = set(SamplingParams.__struct_fields__)
        sampling = {name: fields.pop(name) for name in list(fields) if name in sampling_names}
        sampling = {"temperature": 0.0, **sampling}
        tokenizer = fields.pop("tokenizer", self.tokenizer)
        self.prompts[rid] = prompt
        message = GenerateRequest(
            rid, tokenizer.key, ints.pack(prompt), SamplingParams(max_tokens=max_tokens, **sampling), **fields
        )
        self.from_tokenizer(message, tokenizer)
        return rid

    def abort(self, *rids: str) -> None:
        self.from_tokenizer(AbortRequest(rids))

    def acknowledge(self, *rids: str) -> None:
        self.from_tokenizer(StreamAck(rids))

    def operate(self, name: Any, argument: str = "") -> OperationDone:
        self._count += 1
        self.from_tokenizer(Operation(self._count, name, argument))
        self.turn()
        return self.tokenizer.done[self._count]

    def turn(self) -> None:
        self.scheduler.turn()

    def step(self, worker: LocalWorker, *, deliver: bool = True) -> Any:
        """The worker executes its oldest command and, with `deliver`, its result arrives."""
        self.kv_store(worker)
        command = worker.commands.pop(0)
        if command.masked_slots and command.step_id not in worker.masks:
            self.turn()  # the fill job has answered by now
        result = worker.engine.execute(command, worker.masks.pop(command.step_id, None))
        if deliver:
            self.from_worker(worker, result)
        return result

    # Transfers

    def kv_ready(self, target: LocalWorker, transfer_id: int) -> None:
        self.from_worker(target, KvReady(transfer_id, target.hello.incarnation))

    def kv_move(self, transfer_id: int, *, spoil: bool = False) -> None:
        """The source sends what it was told to; both sides say so. With `spoil` it does not arrive."""
        source = next(w for w in self.workers.values() if transfer_id in w.sends)
        order = source.sends.pop(transfer_id)
        cells = [source.engine.read_page(page) for page in ints.unpack(order.pages)]
        self._kv_done(source, transfer_id, "sent", ok=True)
        target = next((w for w in self.workers.values() if w.hello.worker_id == order.target_id), None)
        if target is None or transfer_id not in target.receives:
            return
        pages = ints.unpack(target.receives.pop(transfer_id).pages)
        if not spoil:
            for page, content in zip(pages, cells, strict=True):
                target.engine.write_page(page, content)
        self._kv_done(target, transfer_id, "received", ok=not spoil)

    def kv_store(self, worker: LocalWorker, *, ok: bool = True) -> None:
        """What is to be kept in a tier and has its turn, among the steps."""
        while worker.stores and worker.stores[0][0] <= worker.engine.next_step:
            order = worker.stores.pop(0)[1]
            for page, slot in zip(ints.unpack(order.pages), ints.unpack(order.slots), strict=True):
                cells = worker.engine.read_page(page) if order.source == "device" else worker.tiers["host", page]
                worker.tiers[order.tier, slot] = cells
            self.from_worker(worker, KvStored(order.order_id, worker.hello.incarnation, order.tier, ok))

    def kv_load(self, worker: LocalWorker, transfer_id: int, *, spoil: bool = False) -> None:
        order = worker.loads.pop(transfer_id)
        if not spoil:
            for page, slot in zip(ints.unpack(order.pages), ints.unpack(order.slots), strict=True):
                worker.engine.write_page(page, worker.tiers[order.tier, slot])
        self._kv_done(worker, transfer_id, "received", ok=not spoil)

    def kv_obey_cancels(self) -> None:
        """Whoever was told to give a transfer up, and is not through with it, says so."""
        for worker in self.workers.values():
            for transfer_id in worker.cancelled:
                if worker.receives.pop(transfer_id, None) is not None:
                    self._kv_done(worker, transfer_id, "received", ok=False)
                if worker.sends.pop(transfer_id, None) is not None:
                    self._kv_done(worker, transfer_id, "sent", ok=False)
                if worker.loads.pop(transfer_id, None) is not None:
                    self._kv_done(worker, transfer_id, "received", ok=False)
            worker.cancelled.clear()

    def kv_work(self) -> bool:
        """Every transfer takes its next step; whether there was one."""
        sends = [number for worker in self.workers.values() for number in worker.sends]
        waits = [
            (worker, number) for worker in self.workers.values() for number in worker.receives if number not in sends
        ]
        cancels = any(worker.cancelled for worker in self.workers.values())
        self.kv_obey_cancels()
        for worker, number in waits:
            if number in worker.receives:
                self.kv_ready(worker, number)
        for number in sends:
            if any(number in worker.sends for worker in self.workers.values()):
                self.kv_move(number)
        loads = [(worker, number) for worker in self.workers.values() for number in worker.loads]
        for worker, number in loads:
            self.kv_load(worker, number)
        for worker in self.workers.values():
            self.kv_store(worker)
        return bool(sends or waits or cancels or loads)

    def _kv_done(self, worker: LocalWorker, transfer_id: int, side: Any, *, ok: bool) -> None:
        self.from_worker(worker, KvDone(transfer_id, worker.hello.incarnation, side, ok, "" if ok else "spoilt"))

    def advance(self, steps: int) -> None:
        """So many steps of every worker that has one to do; what they lead to is planned, and stays to be done."""
        for _ in range(steps):
            self.turn()
            for worker in list(self.workers.values()):
                if worker.commands:
                    self.step(worker)
        self.turn()

    def run(self, limit: int = 10_000) -> None:
        """Until no worker has anything left to do."""
        self.turn()
        for _ in range(limit):
            busy = [worker for worker in self.workers.values() if worker.commands]
            moving = self.kv_work()
            if not busy and not moving and not self.scheduler._inbox:
                return
            for worker in busy:
                self.step(worker)
            self.turn()
        raise AssertionError("this does not end")

    def request(self, rid: str) -> Request:
        return self.core.lifecycle.requests[rid]

    def stream(self, rid: str) -> StreamRecord:
        return self.detokenizer.streams[rid]

    def assert_answered(self, *rids: str) -> None:
        """Each has exactly the tokens that its prompt leads to."""
        for rid in rids:
            request = self.request(rid)
            sampling = request.sampling
            wanted = generate(self.prompts[rid], sampling.max_tokens, sampling.stop_token_ids, sampling.min_new_tokens)
            stream = self.stream(rid)
            assert stream.tokens == wanted, f"{rid}: {stream.tokens} instead of {wanted}"
            assert stream.finish is not None, f"{rid} has not ended"

    @property
    def prefill_tokens(self) -> int:
        return sum(worker.engine.prefill_tokens for worker in self.workers.values())


def tokens(count: int, seed: int = 0) -> list[int]:
    """A prompt of its own for each seed."""
    return random.Random(seed).choices(range(VOCAB), k=count)
