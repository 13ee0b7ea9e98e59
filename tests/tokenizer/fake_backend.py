"""A scheduler and a detokenizer in one object, over real sockets: what the tokenizer service is tested against."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from shared import ints
from shared.messages.control import Heartbeat, Hello, Ping, Pong, ServiceMetrics
from shared.messages.edges import FromTokenizer, TokenizerToDetokenizer
from shared.messages.request import (
    AbortRequest,
    GenerateRequest,
    Operation,
    OperationDone,
    RequestRejected,
    StreamAck,
    SystemStatus,
    WorkerStatus,
)
from shared.messages.stream import Finish, FinishReason, Scores, TextChunk, TextChunks
from shared.transport import PeerBusy, PeerGone, Server

LENGTH = Finish(FinishReason.LENGTH)
WORDS = " hello world and good morning to all of you"


class Script:
    """What one request produces: ids one by one, an end, and gates a test may hold."""

    def __init__(self, ids: list[int], finish: Finish = LENGTH, texts: list[str] | None = None) -> None:
        self.ids = ids
        self.finish = finish
        self.texts = texts
        self.gate: asyncio.Event | None = None  # nothing comes before it is set
        self.pause_after: int | None = None  # tokens before `resume` is awaited
        self.resume = asyncio.Event()
        self.cached_tokens = 0
        self.scores: Callable[[int], Scores] | None = None
        self.prompt_scores: Scores | None = None
        self.endless = False


def endless(request: GenerateRequest) -> Script:
    """For `FakeBackend.script`: an answer that goes on until it is aborted."""
    script = Script([270])
    script.endless = True
    return script


class FakeBackend:
    """Start it, give its `scheduler` endpoint to the service, script the answers."""

    def __init__(self, run_dir: Path, tokenizer: Tokenizer) -> None:
        self.run_dir = run_dir
        self.tokenizer = tokenizer
        self.scheduler = f"ipc://{run_dir}/s"
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.acked: list[str] = []
        self.beats: list[Heartbeat] = []
        self.operations: list[Operation] = []
        self.flush_ok = True
        self.refuse = ""  # an operation
        self.reject: RequestRejected | None = None
        self.script: Callable[[GenerateRequest], Script] = self.default_script
        self.changes: dict[str, Any] = {}
        self.epoch = 1
        self.cached_tokens = 0
        self._frontends: set[bytes] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._sent: dict[str, int] = {}
        self._arrived = asyncio.Condition()
        self._beat: asyncio.Task[None] | None = None

    # Life

    async def start(self) -> None:
        self.front: Server[FromTokenizer] = Server(self.scheduler, FromTokenizer, self._on_message)
        self.start_detokenizer("d1")
        self._beat = asyncio.create_task(self._statuses())

    def start_detokenizer(self, name: str) -> None:
        self.detokenizer_id = f"{name}/1"
        self.detok: Server[TokenizerToDetokenizer] = Server(
            f"ipc://{self.run_dir}/{name}", TokenizerToDetokenizer, self._on_detok_message
        )

    async def stop(self) -> None:
        await self.stop_streams()
        if self._beat is not None:
            self._beat.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beat
            self._beat = None
        self.front.close()
        self.detok.close()

    async def stop_streams(self) -> None:
        """As if this process had died: nothing more is said about any request."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks.clear()

    async def restart(self) -> None:
        """A new scheduler life at the same address."""
        await self.stop()
        self._frontends.clear()
        self.requests.clear()
        self.epoch += 1
        await self.start()

    # Status

    def status(self) -> SystemStatus:
        running = len(self._tasks)
        worker = WorkerStatus("w1", "cpu", True, False, 100, 60, 20, 8, running, 0, 0.1, 30, 70, 40)
        counters = {"cache_hit_tokens": 892.0, "cache_miss_tokens": 108.0, "decode_tokens": 1200.0, "requests": 7.0}
        counters.update(gen_throughput=12.5, cache_hit_rate=0.5, constrained_requests=3.0)
        status = SystemStatus(
            epoch=self.epoch,
            ready=True,
            num_running=running,
            num_waiting=0,
            max_request_tokens=1600,
            detokenizers=((self.detokenizer_id, self.detok.endpoint),),
            workers=(worker,),
            counters=counters,
            services=(ServiceMetrics("scheduler", "s1", {"cpu_seconds": 1.5}),),
        )
        return msgspec.structs.replace(status, **self.changes)

    def publish(self, **changes: Any) -> None:
        """Send a status with these fields now; they stay changed."""
        self.changes.update(changes)
        for identity in list(self._frontends):
            self.to_frontend(identity, self.status())

    async def _statuses(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self.publish()

    # What tests wait for

    async def until(self, condition: Callable[[], object], seconds: float = 10.0) -> None:
        """Wait until a message, or an answer that is held up, made `condition` true."""
        async with asyncio.timeout(seconds), self._arrived:
            await self._arrived.wait_for(lambda: bool(condition()))

    @property
    def live(self) -> int:
        """Requests that still produce tokens."""
        return len(self._tasks)

    # Messages

    def to_frontend(self, identity: bytes, message: msgspec.Struct) -> None:
        with contextlib.suppress(PeerGone, PeerBusy):
            self.front.send(identity, message)

    def _notify(self) -> None:
        async def notify() -> None:
            async with self._arrived:
                self._arrived.notify_all()

        task = asyncio.ensure_future(notify())
        task.add_done_callback(lambda _: None)

    def _on_message(self, identity: bytes, message: FromTokenizer, frames: list[bytes]) -> None:
        match message:
            case Hello():
                self._frontends.add(identity)
                self.to_frontend(identity, self.status())
            case Heartbeat():
                self.beats.append(message)
            case GenerateRequest():
                self._on_request(identity, message)
            case AbortRequest():
                for request_id in message.request_ids:
                    self.aborted.append(request_id)
                    self._abort(request_id)
                for request in [r for r in self.requests if r.request_id in self._tasks]:
                    if set(request.names) & set(message.names) and message.tenant in ("", request.tenant):
                        self.aborted.append(request.request_id)
                        self._abort(request.request_id)
            case StreamAck():
                self.acked.extend(message.request_ids)
            case Operation():
                self.operations.append(message)
                ok = (self.flush_ok or message.name != "flush_cache") and message.name != self.refuse
                self.to_frontend(identity, OperationDone(message.nonce, ok, "" if ok else "2 requests are running"))
                if message.name == "abort_all":
                    for request_id in [r.request_id for r in self.requests if r.request_id in self._tasks]:
                        if not message.tenant or request_id.startswith(f"{message.tenant}:"):
                            self._abort(request_id)
            case Ping():
                self.to_frontend(identity, Pong(message.nonce))
        self._notify()

    def _on_detok_message(self, identity: bytes, message: TokenizerToDetokenizer, frames: list[bytes]) -> None:
        self.detok.send(identity, Pong(0))

    def _on_request(self, identity: bytes, request: GenerateRequest) -> None:
        self.requests.append(request)
        if self.reject is not None:
            self.to_frontend(identity, msgspec.structs.replace(self.reject, request_id=request.request_id))
            return
        script = self.script(request)
        task = asyncio.create_task(self._produce(request, script))
        self._tasks[request.request_id] = task

        def done(_: object) -> None:
            if self._tasks.get(request.request_id) is task:
                del self._tasks[request.request_id]
            self._notify()

        task.add_done_callback(done)

    def _abort(self, request_id: str) -> None:
        task = self._tasks.pop(request_id, None)
        if task is None:
            return
        task.cancel()
        request = next(r for r in reversed(self.requests) if r.request_id == request_id)
        finish = Finish(FinishReason.ABORT, message="aborted")
        sent = self._sent.get(request_id, 0)
        self.say(request, TextChunk(request_id, sent, b"", finish=finish, num_output_tokens=sent))

    # Text

    def default_script(self, request: GenerateRequest) -> Script:
        words = self.tokenizer.encode(WORDS, add_special_tokens=False).ids
        ids = [words[i % len(words)] for i in range(min(request.sampling.max_tokens, 8))]
        script = Script(ids)
        script.cached_tokens = self.cached_tokens
        return script

    def say(self, request: GenerateRequest, *chunks: TextChunk, epoch: int | None = None) -> None:
        """Send text chunks to the frontend of `request`."""
        with contextlib.suppress(PeerGone, PeerBusy):
            epoch = self.epoch if epoch is None else epoch
            self.detok.send(request.frontend_id.encode(), TextChunks(chunks, epoch))

    async def _produce(self, request: GenerateRequest, script: Script) -> None:
        known = list(ints.unpack(request.output_ids))
        if script.gate is not None:
            await script.gate.wait()
        if known:
            text = self.tokenizer.decode(known)
            chunk = TextChunk(request.request_id, 0, ints.pack(known), text, num_output_tokens=len(known))
            self.say(request, msgspec.structs.replace(chunk, reopened=True))
        position = len(known)
        while position < len(script.ids) or script.endless:
            if script.pause_after == position:
                await script.resume.wait()
            self.say(request, self._chunk(request, script, position))
            position += 1
            self._sent[request.request_id] = position
            if script.pause_after == position:
                self._notify()
            await asyncio.sleep(0.001 if script.endless else 0)
        if not script.ids:
            chunk = TextChunk(request.request_id, 0, b"", finish=script.finish, prompt_scores=script.prompt_scores)
            self.say(request, chunk)

    def _chunk(self, request: GenerateRequest, script: Script, position: int) -> TextChunk:
        token = script.ids[position % len(script.ids)]
        last = position + 1 == len(script.ids) and not script.endless
        is_end = last and script.finish.matched_token == token
        text = "" if is_end else self.tokenizer.decode([token])
        if script.texts is not None:
            text = script.texts[position]
        return TextChunk(
            request.request_id,
            position,
            ints.pack([token]),
            text,
            finish=script.finish if last else None,
            num_output_tokens=position + 1,
            cached_tokens=script.cached_tokens,
            scores=script.scores(token) if script.scores is not None else None,
            prompt_scores=script.prompt_scores if position == 0 else None,
        )


def scores_of(positions: Iterable[tuple[float, list[tuple[int, float]]]], wanted: list[float] | None = None) -> Scores:
    """Columns from (logprob, [(top id, top logprob), ...]) rows."""
    from array import array

    rows = list(positions)
    return Scores(
        count=len(rows),
        logprobs=array("f", [row[0] for row in rows]).tobytes(),
        top_ids=ints.pack(token for row in rows for token, _ in row[1]),
        top_logprobs=array("f", [p for row in rows for _, p in row[1]]).tobytes(),
        wanted=array("f", wanted or []).tobytes(),
    )
