"""Every service but a model in one event loop: HTTP door, scheduler, detokenizer and FakeWorkers on real sockets.

The worker speaks text: its next token is a hash of all before it (and of the seed, where it samples), taken from the
words of the tiny tokenizer, so that what every request must answer can be computed without a server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tokenizers import Tokenizer

from services.detokenizer.detokenizer import Detokenizer
from services.scheduler import invariants
from services.scheduler.__main__ import SchedulerService
from services.scheduler.core import Core
from services.tokenizer.service import TokenizerService
from shared import ints
from shared.config import DetokenizerConfig, SchedulerConfig, TokenizerConfig
from shared.messages.request import SamplingParams
from tests.fake_model import chain, hash_of
from tests.fakes import FakeWorker
from tests.local_peers import worker_hello
from tests.tokenizer.tiny_folder import VOCAB_SIZE, write_model_folder

TICK_S = 0.1
CONTEXT = 4096
SECONDS = 20.0  # more than anything here takes


class TextModel:
    """What the FakeWorker says. A stop token comes about every fiftieth token, where there is one."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        texts = {token: self.tokenizer.decode([token]) for token in range(3, self.tokenizer.get_vocab_size())}
        self._words = [token for token, text in texts.items() if len(text) > 1 and text.isascii()]

    def choose(self, state: int, mask: bytes | None, sampling: SamplingParams) -> int:
        """The next token, as FakeEngine asks for it."""
        if sampling.temperature > 0:
            state = chain(state, sampling.seed)
        mixed = chain(state, 7)
        if mask is not None:
            bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little", count=VOCAB_SIZE)
            allowed = np.flatnonzero(bits)
            return int(allowed[mixed % len(allowed)]) if len(allowed) else -1
        for token, bias in zip(
            ints.unpack(sampling.logit_bias_ids), array("f", sampling.logit_bias_values), strict=True
        ):
            if bias >= 50:
                return int(token)
        if sampling.stop_token_ids and mixed % 50 == 0:
            return sampling.stop_token_ids[0]
        return self._words[(mixed >> 8) % len(self._words)]

    def ids(self, prompt: str | list[int], count: int) -> list[int]:
        """A greedy answer that ignores stop tokens."""
        known = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
        state, answer = hash_of(known), []
        for _ in range(count):
            answer.append(self.choose(state, None, SamplingParams(temperature=0.0)))
            state = chain(state, answer[-1])
        return answer

    def text(self, prompt: str | list[int], count: int) -> str:
        return str(self.tokenizer.decode(self.ids(prompt, count), skip_special_tokens=False))


class WholeHouse:
    """Start with `open_house`."""

    def __init__(self, folder: Path, model: TextModel) -> None:
        self.folder = folder
        self.model = model
        self.door: TokenizerService
        self.scheduler: SchedulerService
        self.detokenizer: Detokenizer
        self.workers: list[FakeWorker] = []
        self.client: httpx.AsyncClient

    @property
    def url(self) -> str:
        return self.door.url

    @property
    def core(self) -> Core:
        assert self.scheduler.scheduler is not None
        return self.scheduler.scheduler.core

    async def add_door(self, stack: AsyncExitStack, **config: Any) -> TokenizerService:
        """Another HTTP process before the same scheduler, ready."""
        common = {"model_path": str(self.folder / "m"), "served_model_name": "tiny", "port": 0, "text_threads": 2}
        settings = TokenizerConfig(**{**common, "scheduler": f"ipc://{self.folder}/t", **config})
        door = TokenizerService(settings)
        await door.start()
        stack.push_async_callback(door.close)
        await eventually(lambda: not door.context.frontend.why_not_ready())
        return door

    # What a trial asks for

    async def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return await self.client.post(path, json=body, **options)

    async def complete(self, prompt: str | list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
        """A greedy completion that goes on to its last token."""
        common = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = await self.post("/v1/completions", {**common, **fields})
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    async def events(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """All events of a stream, which must end with [DONE]."""
        answer = await self.post(path, {**body, "stream": True})
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        blocks = [block for block in answer.text.split("\n\n") if block and not block.startswith(":")]
        assert blocks[-1] == "data: [DONE]"
        return [json.loads(block.removeprefix("data: ")) for block in blocks[:-1]]

    # What must hold around a trial

    @asynccontextmanager
    async def trial(self) -> AsyncIterator[None]:
        """A greedy neighbour runs beside what the `with` does; afterwards everything is as it was."""
        begun, stop = asyncio.Event(), asyncio.Event()
        neighbour = asyncio.create_task(self._neighbour(begun, stop))
        try:
            await asyncio.wait_for(begun.wait(), SECONDS)
            yield
        finally:
            stop.set()
            await asyncio.wait_for(neighbour, SECONDS)
        await self.check_books()
        await self.check_next()

    async def _neighbour(self, begun: asyncio.Event, stop: asyncio.Event) -> None:
        """Streams, again and again, until told to stop and a little longer; all of its text must be the model's."""
        prompt = "a quiet neighbour and good morning"
        length = 150
        body = {"prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True, "stream": True}
        expected = self.model.text(prompt, length)
        left = 3
        while left:
            text = ""
            async with self.client.stream("POST", "/v1/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
                        begun.set()
                        left -= stop.is_set()
                        if not left:
                            break
            assert expected.startswith(text)
            assert not left or text == expected

    async def check_books(self) -> None:
        """Nothing runs, waits or is remembered, every page is free or in the tree, nothing went wrong inside."""
        core = self.core
        await eventually(lambda: not core.lifecycle.requests and not self.door.context.frontend.streams.live())
        await eventually(lambda: not self.detokenizer.streams)
        await eventually(lambda: not any(worker.engine.open_slots for worker in self.workers))
        assert (await self.client.get("/health")).status_code == 200
        invariants.check(core.tree, core.fleet, core.lifecycle)
        for worker in core.fleet:
            assert worker.pool.free + core.tree.cached_pages(worker.key) == worker.hello.num_pages
            assert core.tree.evictable_pages(worker.key) == core.tree.cached_pages(worker.key)
        for name in ("internal_errors", "invariant_violations", "workers_lost", "requests_failed"):
            assert core.metrics.counters[name] == 0, name
        assert [worker.error for worker in self.workers] == [None] * len(self.workers)
        assert self.door.context.bodies.held == 0

    async def check_next(self) -> None:
        """The next request gets the right answer."""
        prompt = "the next one"
        answer = await self.complete(prompt, 6)
        assert answer["choices"][0]["text"] == self.model.text(prompt, 6)


async def eventually(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Until `condition` holds."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def open_house(
    folder: Path,
    *,
    step_s: float = 0.003,
    constraints: bool = False,
    scheduler: dict[str, Any] | None = None,
    door: dict[str, Any] | None = None,
    **hello: Any,
) -> AsyncIterator[WholeHouse]:
    """All services, ready. `folder` must have a short path: sockets are in it. `hello` are fields of the worker's."""
    model_path = write_model_folder(folder / "m", max_position_embeddings=CONTEXT)
    house = WholeHouse(folder, TextModel(model_path))
    ends = {name: f"ipc://{folder}/{name}" for name in ("t", "d", "w")}
    async with AsyncExitStack() as stack:
        house.scheduler = SchedulerService(
            SchedulerConfig(
                tokenizer_bind=ends["t"],
                detokenizer_bind=ends["d"],
                worker_bind=ends["w"],
                # All share one event loop: what holds it up must not look like a loss.
                **{
                    "model_path": str(model_path) if constraints else "",
                    "heartbeat_timeout": 60.0,
                    **(scheduler or {}),
                },
            )
        )
        await house.scheduler.start()
        stack.push_async_callback(house.scheduler.close)
        assert house.scheduler.scheduler is not None
        house.scheduler.scheduler.checking = True
        common = {"num_pages": 1024, "max_slots": 32, "max_context": CONTEXT, "vocab_size": VOCAB_SIZE}
        worker = FakeWorker(ends["w"], worker_hello("w0", **{**common, **hello}), step_s)
        worker.engine.choose = house.model.choose
        house.workers.append(worker)
        stack.push_async_callback(worker.close)
        config = DetokenizerConfig(model_path=str(model_path), scheduler=ends["d"], bind=f"ipc://{folder}/o")
        house.detokenizer = Detokenizer(config)
        await house.detokenizer.start()
        stack.push_async_callback(house.detokenizer.close)
        ticking = asyncio.create_task(_tick(house))
        stack.push_async_callback(_cancel, ticking)
        house.door = await house.add_door(stack, **(door or {}))
        limits = httpx.Limits(max_connections=None)
        house.client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=house.url, timeout=SECONDS, limits=limits)
        )
        yield house


async def _tick(house: WholeHouse) -> None:
    """What the life of a process does once a second."""
    while True:
        house.scheduler.heartbeat()
        house.detokenizer.heartbeat()
        door = getattr(house, "door", None)
        if door is not None:
            door.heartbeat()
        await asyncio.sleep(TICK_S)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
