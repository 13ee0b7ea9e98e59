"""The scheduler's peers as objects of one thread: what they were told and hold. Leaves driving them to local_fleet."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from shared import ints
from shared.messages.control import Ping, Pong
from shared.messages.kv import KvCancel, KvLoad, KvReceive, KvSend, KvStore
from shared.messages.request import (
    OperationDone,
    RequestRejected,
    SystemStatus,
)
from shared.messages.step import Drain, StepCommand, TokenMasks, WorkerHello, WorkerReset, WorkerWelcome
from shared.messages.stream import Finish, Scores, StreamOpen, TokenChunks
from shared.transport import PeerBusy, PeerGone
from tests.fake_engine import FakeEngine
from tests.fake_model import VOCAB


def worker_hello(worker_id: str = "w", incarnation: int = 1, **changes: Any) -> WorkerHello:
    fields: dict[str, Any] = {
        "worker_id": worker_id,
        "incarnation": incarnation,
        "model": "fake",
        "model_digest": "d1",
        "page_size": 16,
        "num_pages": 256,
        "max_slots": 16,
        "max_batched_tokens": 128,
        "max_context": 4096,
        "max_inflight_steps": 2,
        "vocab_size": VOCAB,
        "device": "fake",
        "kv_dtype": "float32",
        "kv_layout": "HND",
        "kv_bytes_per_page": 1024,
    }
    return WorkerHello(**{**fields, **changes})


class LocalEdge:
    """One socket of the scheduler. Every message is encoded and decoded, as on a wire."""

    def __init__(self, union: Any) -> None:
        self.peers: dict[bytes, Callable[..., None]] = {}
        self.busy: set[bytes] = set()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(union)

    def send(self, identity: bytes, message: msgspec.Struct, *frames: bytes | memoryview) -> None:
        if identity in self.busy:
            raise PeerBusy
        if identity not in self.peers:
            raise PeerGone
        decoded = self._decoder.decode(self._encoder.encode(message))
        if frames:
            self.peers[identity](decoded, *map(bytes, frames))
        else:
            self.peers[identity](decoded)


class StreamRecord:
    """What a detokenizer knows of one request; complains about anything missing or sent twice."""

    def __init__(self, opening: StreamOpen) -> None:
        self.opening = opening
        self.tokens = ints.unpack(opening.output_ids).tolist()
        self.finish: Finish | None = opening.finish
        self.cached_tokens = opening.cached_tokens
        self.retractions = 0
        self.prompt_scores: Scores | None = opening.prompt_scores
        self.logprobs = array("f", opening.scores.logprobs if opening.scores else b"")


class LocalDetokenizer:
    def __init__(self, key: str) -> None:
        self.key = key
        self.streams: dict[str, StreamRecord] = {}
        self.num_messages = 0
        self.pongs: list[Pong] = []

    def receive(self, message: Any) -> None:
        self.num_messages += 1
        if isinstance(message, StreamOpen):
            self.streams[message.request_id] = StreamRecord(message)
        elif isinstance(message, TokenChunks):
            for chunk in message.chunks:
                self._chunk(chunk)
        elif isinstance(message, Pong):
            self.pongs.append(message)

    def _chunk(self, chunk: Any) -> None:
        stream = self.streams[chunk.request_id]
        assert stream.finish is None, f"{chunk.request_id}: a chunk after the last"
        assert chunk.offset == len(stream.tokens), f"{chunk.request_id}: a gap or a repetition"
        tokens = ints.unpack(chunk.token_ids).tolist()
        assert tokens or chunk.finish, f"{chunk.request_id}: an empty chunk"
        stream.tokens += tokens
        stream.finish = chunk.finish
        stream.cached_tokens = chunk.cached_tokens
        stream.retractions = chunk.retractions
        if chunk.scores is not None:
            stream.logprobs.frombytes(chunk.scores.logprobs)
        if chunk.prompt_scores is not None:
            assert stream.prompt_scores is None, f"{chunk.request_id}: prompt scores twice"
            stream.prompt_scores = chunk.prompt_scores


class LocalTokenizer:
    def __init__(self, key: str) -> None:
        self.key = key
        self.status: SystemStatus | None = None
        self.num_statuses = 0
        self.rejected: dict[str, RequestRejected] = {}
        self.done: dict[int, OperationDone] = {}

    def receive(self, message: Any) -> None:
        if isinstance(message, SystemStatus):
            self.status = message
            self.num_statuses += 1
        elif isinstance(message, RequestRejected):
            self.rejected[message.request_id] = message
        elif isinstance(message, OperationDone):
            self.done[message.nonce] = message


class LocalWorker:
    """Commands wait until the test lets the worker do a step."""

    def __init__(self, hello: WorkerHello) -> None:
        self.hello = hello
        self.key = f"{hello.worker_id}/{hello.incarnation}"
        self.engine = FakeEngine(hello)
        self.commands: list[StepCommand] = []
        self.masks: dict[int, tuple[bytes, bytes]] = {}  # by step
        self.welcome: WorkerWelcome | None = None
        self.reset: WorkerReset | None = None
        self.drain: Drain | None = None
        self.num_pings = 0
        self.receives: dict[int, KvReceive] = {}  # transfers it awaits
        self.sends: dict[int, KvSend] = {}
        self.cancelled: list[int] = []
        self.stores: list[tuple[int, KvStore]] = []  # with the number of steps that come before
        self.loads: dict[int, KvLoad] = {}
        self.tiers: dict[tuple[str, int], Any] = {}  # what each slot holds

    def receive(self, message: Any, *frames: bytes) -> None:
        if isinstance(message, KvReceive):
            self.receives[message.transfer_id] = message
        elif isinstance(message, KvSend):
            self.sends[message.transfer_id] = message
        elif isinstance(message, KvCancel):
            self.cancelled.append(message.transfer_id)
        elif isinstance(message, KvStore):
            self.stores.append((self.engine.next_step + len(self.commands), message))
        elif isinstance(message, KvLoad):
            self.loads[message.transfer_id] = message
        elif isinstance(message, TokenMasks):
            assert message.step_id not in self.masks, "masks twice"
            self.masks[message.step_id] = (message.slots, frames[0])
        elif isinstance(message, StepCommand):
            assert len(self.commands) < self.hello.max_inflight_steps, "more steps than credits"
            self.commands.append(message)
        elif isinstance(message, WorkerWelcome):
            self.welcome = message
            self.engine.epoch = message.epoch
        elif isinstance(message, WorkerReset):
            self.reset = message
        elif isinstance(message, Drain):
            self.drain = message
        elif isinstance(message, Ping):
            self.num_pings += 1
