"""Peers of the scheduler on real sockets: FakeWorker, FakeDetokenizer, FakeFrontend. What they do is in local_fleet and
fake_engine; here is only how it travels."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from shared import ints
from shared.messages.control import Heartbeat, Hello, Ping, Pong
from shared.messages.edges import ToDetokenizer, ToTokenizer, ToWorker
from shared.messages.request import AbortRequest, GenerateRequest, Operation, OperationDone, SamplingParams, StreamAck
from shared.messages.step import Drain, StepCommand, TokenMasks, WorkerFault, WorkerHello, WorkerReset, WorkerWelcome
from shared.transport import Client, Frames
from tests.fake_engine import FakeEngine, ProtocolError
from tests.local_peers import LocalDetokenizer, LocalTokenizer

HEARTBEAT_S = 0.2


class _Peer:
    """A client that introduces itself until it is answered, and whose news can be waited for."""

    def __init__(self, endpoint: str, service_id: str, incarnation: int, union: Any) -> None:
        self.service_id = service_id
        self.incarnation = incarnation
        self.key = f"{service_id}/{incarnation}"
        self.client: Client[Any] = Client(endpoint, self.key, union, self._receive)
        self.greeted = asyncio.Event()
        self.silent = False  # frozen: no heartbeats, nothing is read
        self._news = asyncio.Condition()
        self._tasks = [asyncio.create_task(self._introduce()), asyncio.create_task(self._beat())]

    def hello(self) -> Any:
        raise NotImplementedError

    def handle(self, message: Any, *frames: bytes) -> None:
        raise NotImplementedError

    async def until(self, condition: Callable[[], Any], timeout: float = 20.0) -> None:
        """Wait until `condition` holds; it is asked again whenever something arrives."""

        async def wait() -> None:
            async with self._news:
                await self._news.wait_for(condition)

        await asyncio.wait_for(wait(), timeout)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self.client.close()

    def spawn(self, work: Any) -> None:
        self._tasks.append(asyncio.create_task(work))

    def _receive(self, message: Any, frames: Frames) -> None:
        if self.silent:
            return
        if isinstance(message, Ping):
            self.client.try_send(Pong(message.nonce))
            return
        self.handle(message, *frames)
        self.spawn(self._tell())

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def _introduce(self) -> None:
        while not self.greeted.is_set():
            self.client.try_send(self.hello())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.greeted.wait(), 0.1)

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self.service_id, self.incarnation)

    async def _beat(self) -> None:
        await self.greeted.wait()
        while True:
            if not self.silent:
                self.client.try_send(self.heartbeat())
            await asyncio.sleep(HEARTBEAT_S)


class FakeWorker(_Peer):
    """Executes commands in order, `step_s` each; `gate` shut holds it before the next one."""

    def __init__(self, endpoint: str, hello: WorkerHello, step_s: float = 0.0, *, verify: bool = True) -> None:
        self.engine = FakeEngine(hello, verify=verify)
        self.step_s = step_s
        self.gate = asyncio.Event()
        self.gate.set()
        self.lose_results = 0  # so many results are computed and never sent
        self.num_results = 0
        self.reset: WorkerReset | None = None
        self.drained: Drain | None = None
        self.error: ProtocolError | None = None
        self.masks: dict[int, tuple[bytes, bytes]] = {}  # by step
        self._queue: asyncio.Queue[StepCommand] = asyncio.Queue()
        super().__init__(endpoint, hello.worker_id, hello.incarnation, ToWorker)
        self.spawn(self._work())

    def hello(self) -> WorkerHello:
        return self.engine.hello

    def handle(self, message: Any, *frames: bytes) -> None:
        if isinstance(message, WorkerWelcome):
            self.engine.epoch = message.epoch
            self.greeted.set()
        elif isinstance(message, StepCommand):
            self._queue.put_nowait(message)
        elif isinstance(message, TokenMasks):
            self.masks[message.step_id] = (message.slots, frames[0])
        elif isinstance(message, WorkerReset):
            self.reset = message
            self.greeted.set()
        elif isinstance(message, Drain):
            self.drained = message

    async def _work(self) -> None:
        while True:
            command = await self._queue.get()
            await self.gate.wait()
            if self.step_s:
                await asyncio.sleep(self.step_s)
            if command.masked_slots:
                await self.until(lambda step=command.step_id: step in self.masks)  # type: ignore[misc]
            try:
                result = self.engine.execute(command, self.masks.pop(command.step_id, None))
            except ProtocolError as error:
                self.error = error
                self.client.send(WorkerFault(self.incarnation, command.step_id, "protocol", str(error)))
                return
            self.num_results += 1
            if self.lose_results:
                self.lose_results -= 1
            elif not self.silent:
                self.client.send(result)
            await self._tell()


class FakeDetokenizer(_Peer):
    def __init__(self, endpoint: str, service_id: str = "detok", incarnation: int = 1) -> None:
        self.record = LocalDetokenizer(f"{service_id}/{incarnation}")
        super().__init__(endpoint, service_id, incarnation, ToDetokenizer)

    @property
    def streams(self) -> dict[str, Any]:
        return self.record.streams

    def hello(self) -> Hello:
        return Hello("detokenizer", self.service_id, self.incarnation, f"ipc://{self.service_id}")

    def handle(self, message: Any, *frames: bytes) -> None:
        self.greeted.set()
        self.record.receive(message)

    def finished(self, *rids: str) -> bool:
        return all(rid in self.streams and self.streams[rid].finish is not None for rid in rids)


class FakeFrontend(_Peer):
    def __init__(self, endpoint: str, service_id: str = "front", incarnation: int = 1) -> None:
        self.record = LocalTokenizer(f"{service_id}/{incarnation}")
        self._nonce = 0
        super().__init__(endpoint, service_id, incarnation, ToTokenizer)

    def hello(self) -> Hello:
        return Hello("tokenizer", self.service_id, self.incarnation)

    def handle(self, message: Any, *frames: bytes) -> None:
        self.greeted.set()
        self.record.receive(message)

    def submit(self, rid: str, prompt: list[int], max_tokens: int, **fields: Any) -> None:
        sampling_names = set(SamplingParams.__struct_fields__)
        sampling = {name: fields.pop(name) for name in list(fields) if name in sampling_names}
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)
        self.client.send(GenerateRequest(rid, self.key, ints.pack(prompt), params, **fields))

    def resubmit(self, rid: str, prompt: list[int], output: list[int], max_tokens: int, epoch: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        message = GenerateRequest(rid, self.key, ints.pack(prompt), params, epoch=epoch, output_ids=ints.pack(output))
        self.client.send(message)

    def abort(self, *rids: str) -> None:
        self.client.send(AbortRequest(rids))

    def acknowledge(self, *rids: str) -> None:
        self.client.send(StreamAck(rids))

    async def operate(self, name: Any, argument: str = "") -> OperationDone:
        self._nonce += 1
        nonce = self._nonce
        self.client.send(Operation(nonce, name, argument))
        await self.until(lambda: nonce in self.record.done)
        return self.record.done[nonce]
