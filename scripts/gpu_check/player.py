"""One worker in this process, and a scheduler that sends it just the steps a check or a benchmark is about.

Everything goes over the worker's own socket, so that what runs is what serves: run-ahead, graphs, masks, faults. Leaves
what is to be learnt from the answers to the callers.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

from services.gpu_worker.worker import Worker
from shared import ints
from shared.config import WorkerConfig
from shared.messages.control import Heartbeat, Ping, Pong
from shared.messages.edges import FromWorker
from shared.messages.request import SamplingParams
from shared.messages.step import (
    PrefillRow,
    SlotOpen,
    StepCommand,
    StepResult,
    TokenMasks,
    WorkerFault,
    WorkerHello,
    WorkerWelcome,
)
from shared.transport import Frames, Server

GREEDY = SamplingParams(temperature=0.0, logprobs=0)
MaskMaker = Callable[[int, int], np.ndarray]
"""(sequence, step) -> bool [vocab]: what may be sampled."""
Shares = Sequence[tuple[range, int]]
"""(sequences, pages): whose first so many pages are the same; nested, the outer before the inner."""


class WorkerFailed(RuntimeError):
    """The worker answered with a fault."""


@dataclass
class Answer:
    """What one sequence was answered."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class _Seat:
    """A sequence on the worker."""

    slot: int
    length: int  # tokens computed once all commands are executed
    pages: list[int]
    answer: Answer


class Player:
    """An async context manager. `flags` are fields of WorkerConfig."""

    def __init__(self, model: str, device: str, **flags: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="radixfleet-check-")
        endpoint = f"ipc://{self._folder.name}/worker"
        self._news: asyncio.Queue[Any] = asyncio.Queue()
        self._server: Server[FromWorker] = Server(endpoint, FromWorker, self._receive)
        config = WorkerConfig(scheduler=endpoint, service_id="checked", model_path=model, device=device, **flags)  # type: ignore[arg-type]
        self._worker = Worker(config, end_process=lambda: None)
        self._identity = b""
        self._step = 0
        self._closing = b""  # slots that the next command closes
        self._owed: deque[list[_Seat]] = deque()  # of each step in flight: whose samples come back
        self._results: deque[StepResult] = deque()
        self._free_pages: list[int] = []
        self._free_slots: list[int] = []
        self.hello = WorkerHello("", 0, "", "", 0, 0, 0, 0, 0, 0, 0, "", "", "", 0)

    async def __aenter__(self) -> Player:
        await self._worker.start()
        self.hello = await self._next(WorkerHello)
        self._server.send(self._identity, WorkerWelcome(1))
        self._server.send(self._identity, Ping(0))
        await self._next(Pong)  # it has heard the welcome
        self._free_pages = list(range(self.hello.num_pages - 1, -1, -1))
        self._free_slots = list(range(self.hello.max_slots - 1, -1, -1))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._worker.close()
        self._server.close()
        self._folder.cleanup()

    async def gauges(self) -> dict[str, float]:
        """Those of the worker's next heartbeat."""
        self._worker.heartbeat()
        return dict((await self._next(Heartbeat)).gauges)

    async def decode_gauges(self, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        """Gauges while the last step was one of decode rows only."""
        seats = await self._prefill(prompts, GREEDY, 4, (), 0, None)
        await self._decode(seats, 2, 1, (), None, 1)
        found = await self.gauges()
        self._close(seats)
        await self._send({})
        await self._settle(0)
        return found

    async def generate(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        *,
        depth: int = 2,
        params: SamplingParams = GREEDY,
        shares: Shares = (),
        groups: bool = False,
        chunk: int = 0,
        mask: MaskMaker | None = None,
        interrupt_after: int = 0,
    ) -> list[Answer]:
        """`count` tokens for every prompt, all rows in each step, `depth` steps in flight.

        shares           pages that are computed once, by the first of the sequences; with `groups` said to be shared
        interrupt_after  after so many tokens all seats are taken away; prompt and answer are computed anew elsewhere
        """
        seats = await self._prefill(prompts, params, count, shares, chunk, mask)
        told = shares if groups else ()
        if interrupt_after:
            await self._decode(seats, interrupt_after - 1, depth, told, mask, 1)
            answers = [seat.answer for seat in seats]
            self._close(seats)
            known = [[*prompt, *answer.tokens] for prompt, answer in zip(prompts, answers, strict=True)]
            # Pages are handed out from the other end now: nothing of the former ones can be of use by chance.
            self._free_pages.reverse()
            seats = await self._prefill(known, params, count - interrupt_after, (), chunk, mask, answers)
            await self._decode(seats, count - interrupt_after - 1, depth, (), mask, interrupt_after + 1)
        else:
            await self._decode(seats, count - 1, depth, told, mask, 1)
        self._close(seats)
        await self._send({})
        await self._settle(0)
        return [seat.answer for seat in seats]

    async def score(self, prompt: Sequence[int], chunk: int) -> list[float]:
        """Log-probabilities of the prompt's tokens after the first, computed in chunks of so many tokens."""
        (seat,) = self._seat([prompt], SamplingParams(temperature=0.0), (), [Answer()])
        scores: list[float] = []
        for start in range(0, len(prompt), chunk):
            end = min(start + chunk, len(prompt))
            following = prompt[end] if end < len(prompt) else -1
            tokens = ints.pack(prompt[start:end])
            row = PrefillRow(seat.slot, tokens, sample=False, score_from=1, next_token=following)
            opens = (self._open(seat, prompt, SamplingParams(temperature=0.0), 0, 1),) if start == 0 else ()
            await self._send({"prefills": (row,), "opens": opens})
            result = await self._result()
            for block in result.prompt_scores:
                scores += np.frombuffer(block.scores.logprobs, "<f4").tolist()
        self._close([seat])
        await self._send({})
        await self._settle(0)
        return scores

    async def decode_seconds(self, rows: int, context: int, steps: int) -> float:
        """Seconds of one decode step of so many rows over so many tokens each, whatever their pages hold."""
        room = context + steps + 4
        prompts = [[1] * room] * rows
        params = SamplingParams(temperature=0.0)
        seats = self._seat(prompts, params, (), [Answer() for _ in prompts])
        opens = tuple(self._open(seat, [1] * context, params, context - 1, steps + 4) for seat in seats)
        per_step = max(1, self.hello.max_batched_tokens)
        for first in range(0, rows, per_step):
            part = seats[first : first + per_step]
            prefills = tuple(PrefillRow(seat.slot, ints.pack([1])) for seat in part)
            await self._send({"opens": opens[first : first + per_step], "prefills": prefills}, part)
            await self._settle(0)
        slots = ints.pack(seat.slot for seat in seats)
        started = 0.0
        for number in range(steps + 2):
            if number == 2:  # the first ones set up what later ones use
                await self._settle(0)
                started = time.perf_counter()
            await self._send({"decode_slots": slots}, seats)
            await self._settle(1)
        await self._settle(0)
        seconds = (time.perf_counter() - started) / steps
        self._close(seats)
        await self._send({})
        await self._settle(0)
        return seconds

    async def prefill_seconds(self, tokens: int, repeat: int) -> float:
        """Seconds of one step that computes a prompt of so many tokens alone; the best of `repeat`."""
        best = float("inf")
        for number in range(repeat):
            prompt = [(7 * i + number) % self.hello.vocab_size for i in range(tokens)]
            params = SamplingParams(temperature=0.0)
            (seat,) = self._seat([prompt], params, (), [Answer()])
            opened = self._open(seat, prompt, params, 0, 1)
            started = time.perf_counter()
            await self._send({"opens": (opened,), "prefills": (PrefillRow(seat.slot, ints.pack(prompt)),)}, [seat])
            await self._settle(0)
            best = min(best, time.perf_counter() - started)
            self._close([seat])
        await self._send({})
        await self._settle(0)
        return best

    # Parts of a generation

    async def _prefill(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        count: int,
        shares: Shares,
        chunk: int,
        mask: MaskMaker | None,
        answers: list[Answer] | None = None,
    ) -> list[_Seat]:
        """One prompt after the other, in chunks; each chunk is a step."""
        first_step = len(answers[0].tokens) if answers else 0
        seats = self._seat(prompts, params, shares, answers or [Answer() for _ in prompts])
        chunk = min(chunk or self.hello.max_batched_tokens, self.hello.max_batched_tokens)
        for index, (seat, prompt) in enumerate(zip(seats, prompts, strict=True)):
            computed = _copied(index, shares)[1] * self.hello.page_size
            opens: tuple[SlotOpen, ...] = (self._open(seat, prompt, params, computed, count),)
            for start in range(computed, len(prompt), chunk):
                part = prompt[start : start + chunk]
                last = start + len(part) == len(prompt)
                row = PrefillRow(seat.slot, ints.pack(part), sample=last)
                fields = {"opens": opens, "prefills": (row,)}
                await self._send(
                    fields, [seat] if last else [], self._masks([index], first_step, mask if last else None, seats)
                )
                await self._settle(1)
                opens = ()
            seat.length = len(prompt)
        await self._settle(0)
        return seats

    async def _decode(
        self,
        seats: list[_Seat],
        steps: int,
        depth: int,
        groups: Shares,
        mask: MaskMaker | None,
        first_step: int,
    ) -> None:
        slots = ints.pack(seat.slot for seat in seats)
        fields: dict[str, Any] = {"decode_slots": slots}
        if groups:
            fields |= {
                "group_slots": ints.pack(seats[row].slot for members, _ in groups for row in members),
                "group_sizes": ints.pack(len(members) for members, _ in groups),
                "group_pages": ints.pack(pages for _, pages in groups),
            }
        for number in range(steps):
            grown: list[tuple[int, int]] = []
            for seat in seats:
                seat.length += 1
                if seat.length > len(seat.pages) * self.hello.page_size:
                    seat.pages.append(self._free_pages.pop())
                    grown.append((seat.slot, seat.pages[-1]))
            pages = {
                "page_slots": ints.pack(slot for slot, _ in grown),
                "page_ids": ints.pack(page for _, page in grown),
            }
            masks = self._masks(range(len(seats)), first_step + number, mask, seats)
            await self._send({**fields, **pages}, seats, masks)
            await self._settle(depth - 1)
        await self._settle(0)

    def _seat(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, shares: Shares, answers: list[Answer]
    ) -> list[_Seat]:
        seats: list[_Seat] = []
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            first, count = _copied(index, shares)
            shared = seats[first].pages[:count] if count else []
            own = -(-len(prompt) // self.hello.page_size) - count
            pages = [*shared, *(self._free_pages.pop() for _ in range(own))]
            seats.append(_Seat(self._free_slots.pop(), 0, pages, answer))
        return seats

    def _open(
        self, seat: _Seat, prompt: Sequence[int], params: SamplingParams, computed: int, remaining: int
    ) -> SlotOpen:
        return SlotOpen(seat.slot, params, len(prompt), computed, ints.pack(seat.pages), remaining=remaining)

    def _close(self, seats: list[_Seat]) -> None:
        """Their slots are closed by the next command, which nothing else may be sent before."""
        self._closing = ints.pack(seat.slot for seat in seats)
        pages = dict.fromkeys(page for seat in seats for page in seat.pages)
        self._free_pages += pages
        self._free_slots += [seat.slot for seat in seats]

    def _masks(
        self, rows: Sequence[int], step: int, mask: MaskMaker | None, seats: list[_Seat]
    ) -> tuple[bytes, bytes] | None:
        if mask is None:
            return None
        words = -(-self.hello.vocab_size // 32)
        bits = np.zeros((len(rows), words * 32), np.bool_)
        for place, row in enumerate(rows):
            bits[place, : self.hello.vocab_size] = mask(row, step)
        packed = np.packbits(bits, axis=1, bitorder="little").tobytes()
        return ints.pack(seats[row].slot for row in rows), packed

    # The wire

    async def _send(
        self, fields: dict[str, Any], sampling: Sequence[_Seat] = (), masks: tuple[bytes, bytes] | None = None
    ) -> None:
        masked = {"masked_slots": masks[0]} if masks is not None else {}
        command = StepCommand(step_id=self._step, epoch=1, closes=self._closing, **{**fields, **masked})
        self._closing = b""
        self._server.send(self._identity, command)
        if masks is not None:
            self._server.send(self._identity, TokenMasks(self._step, 1, masks[0]), masks[1])
        self._owed.append(list(sampling))
        self._step += 1

    async def _settle(self, most: int) -> None:
        """Take results until no more than `most` are owed."""
        while len(self._owed) > most:
            await self._result()

    async def _result(self) -> StepResult:
        result: StepResult = await self._next(StepResult)
        seats = self._owed.popleft()
        if result.errors:
            raise WorkerFailed(str(result.errors))
        for seat, token in zip(seats, ints.unpack(result.token_ids), strict=True):
            if token >= 0:
                seat.answer.tokens.append(token)
        for scored in result.scores:
            seats[scored.row].answer.logprobs += np.frombuffer(scored.scores.logprobs, "<f4").tolist()
        return result

    async def _next(self, kind: type[Any]) -> Any:
        while True:
            message = await self._news.get()
            if isinstance(message, WorkerFault):
                raise WorkerFailed(f"{message.kind} in step {message.step_id}: {message.detail}")
            if isinstance(message, kind):
                return message

    def _receive(self, identity: bytes, message: FromWorker, frames: Frames) -> None:
        self._identity = identity
        self._news.put_nowait(message)


def _copied(index: int, shares: Shares) -> tuple[int, int]:
    """(which earlier sequence has them, how many): the most pages that the sequence finds computed."""
    found = [(members.start, pages) for members, pages in shares if index in members and index > members.start]
    return max(found, key=lambda share: share[1], default=(0, 0))
