"""One HTTP request from submit to the last byte: waits, writes, keeps alive, and aborts what is unfinished once.

Leaves the words to an Answerer and the sockets to frontend. It is an ASGI response, so that one `finally`
covers all ways a request can end: done, failed, client gone while queued, prefilling, decoding or not streaming.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Protocol

import structlog
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from services.tokenizer import sse
from services.tokenizer.errors import ApiError, ClientGone
from services.tokenizer.frontend import Frontend
from services.tokenizer.metrics import RequestTimer
from services.tokenizer.output import Output
from services.tokenizer.streams import Group, Stream

log = structlog.get_logger(__name__)

INLINE_WEIGHT = 2000  # larger answers are put together in the thread pool
ADMISSION_WAIT_S = 0.1  # a refusal that comes within this time is a status, not an event
SCHEDULER_MARGIN_S = 1.0  # the scheduler ends what is overdue; where it is away, this process does
COMPILE_WAIT_S = 10.0  # the same while a constraint may be compiled


class Answerer(Protocol):
    """Puts outputs into the words of one API."""

    def event(self, index: int, news: Output) -> bytes:
        """Events for what is new in stream `index`; may be empty."""
        ...

    def end(self) -> bytes:
        """Events after the last stream has ended, `[DONE]` included."""
        ...

    def whole(self, outputs: list[Output]) -> bytes:
        """The body of an answer that is not streamed."""
        ...


class Offload(Protocol):
    """Runs a function in the thread pool."""

    def __call__(self, work: Callable[[list[Output]], bytes], outputs: list[Output], /) -> Awaitable[bytes]: ...


def _weight(output: Output) -> int:
    """How many rows of log-probabilities there are to be written."""
    prompt = output.prompt_scores
    width = 1 + output.scores.k + output.scores.m
    return (len(output.scores) + (len(prompt) if prompt is not None else 0)) * width


class Exchange(Response):
    """Sends the group, answers its client."""

    def __init__(
        self,
        frontend: Frontend,
        group: Group,
        answerer: Answerer,
        timer: RequestTimer,
        *,
        streaming: bool,
        keep_alive_interval: float,
        headers: Mapping[str, str],
        offload: Offload,
    ) -> None:
        super().__init__(headers=dict(headers))
        self._frontend = frontend
        self._group = group
        self._answerer = answerer
        self._timer = timer
        self._streaming = streaming
        self._keep_alive_interval = keep_alive_interval
        self._extra_headers = dict(headers)
        self._offload = offload
        self._gone = False
        self._explain: Callable[[ApiError], ApiError] = lambda error: error
        self._fail: Callable[[ApiError], bytes] = self._usage_and_error
        self._settle: Callable[[], Awaitable[None]] | None = None

    def adapt(
        self,
        *,
        explain: Callable[[ApiError], ApiError] | None = None,
        fail: Callable[[ApiError], bytes] | None = None,
        settle: Callable[[], Awaitable[None]] | None = None,
    ) -> Exchange:
        """This exchange with another API's manners.

        `explain` puts failures of the engine in the request's terms, `fail` renders one in mid-stream, `settle` is
        awaited when the answer is complete, before its last bytes leave.
        """
        self._explain = explain or self._explain
        self._fail = fail or self._fail
        self._settle = settle
        return self

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        overdue: asyncio.TimerHandle | None = None
        try:
            self._frontend.submit(self._group)
            if left := self._group.time_left:
                overdue = asyncio.get_running_loop().call_later(left + SCHEDULER_MARGIN_S, self._group.time_out)
            response = await self._stream() if self._streaming else await self._whole(receive)
            await response(scope, receive, send)
        except ClientGone:
            log.debug("client gone", request_ids=[s.request.request_id for s in self._group.streams])
        finally:
            if overdue is not None:
                overdue.cancel()
            self._frontend.close(self._group)
            self._timer.close(finished=all(s.done and s.error is None for s in self._group.streams))

    async def _whole(self, receive: Receive) -> Response:
        watcher = asyncio.ensure_future(self._watch(receive))
        outputs = [Output(*stream.widths) for stream in self._group.streams]
        try:
            while not self._group.done or self._group.has_news:
                await self._group.wait()
                if self._gone:
                    raise ClientGone
                for stream, news in self._take():
                    if news is not None:
                        outputs[stream.index].join(news)
                    if stream.error is not None:
                        raise self._explain(stream.error)
        finally:
            watcher.cancel()
        is_large = sum(map(_weight, outputs)) > INLINE_WEIGHT
        body = await self._offload(self._answerer.whole, outputs) if is_large else self._answerer.whole(outputs)
        if self._settle is not None:
            await self._settle()
        return Response(body, 200, self._extra_headers, "application/json")

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        self._group.nudge()

    async def _stream(self) -> Response:
        """Headers go out with the first news, or soon without: until then a refusal still has its status."""
        constrained = any(stream.request.constraint is not None for stream in self._group.streams)
        patience = COMPILE_WAIT_S if constrained else ADMISSION_WAIT_S
        timer = asyncio.get_running_loop().call_later(patience, self._group.nudge)
        await self._group.wait()
        timer.cancel()
        for stream in self._group.streams:
            if stream.error is not None and not stream.received:
                raise self._explain(stream.error)
        headers = {**sse.HEADERS, **self._extra_headers}
        return StreamingResponse(self._events(), 200, headers, sse.MEDIA_TYPE)

    async def _events(self) -> AsyncIterator[bytes]:
        group = self._group
        group.writer = asyncio.current_task()
        silence = Silence(self._keep_alive_interval, group.nudge)
        data = b""
        try:
            while not group.done or group.has_news:
                await group.wait()
                data, failure = self._gather()
                if failure is not None:
                    group.writing_since = time.monotonic()
                    yield data + self._fail(self._explain(failure))
                    return
                if group.done and not group.has_news:
                    break
                if data or silence.is_long():
                    group.writing_since = time.monotonic()
                    yield data or sse.KEEP_ALIVE
                    group.writing_since = None
                    silence.broken()
            data += self._answerer.end()
            if self._settle is not None:
                await self._settle()
            group.writing_since = time.monotonic()
            yield data
        finally:
            silence.close()

    def _usage_and_error(self, error: ApiError) -> bytes:
        """The counts first: clients stop reading at an error."""
        return self._answerer.end().removesuffix(sse.DONE) + sse.error(error) + sse.DONE

    def _gather(self) -> tuple[bytes, ApiError | None]:
        """Everything that is new, for one write."""
        pieces = []
        for stream, news in self._take():
            if news is not None:
                pieces.append(self._answerer.event(stream.index, news))
            if stream.error is not None:
                return b"".join(pieces), stream.error
        return b"".join(pieces), None

    def _take(self) -> Iterator[tuple[Stream, Output | None]]:
        for stream in self._group.take_ready():
            news = stream.take()
            if news is not None:
                self._timer.news(stream.index, news)
                if stream.error is not None:
                    news.finish = None  # the error is the end the client sees
            yield stream, news


class Silence:
    """Calls back when nothing was sent for an interval; costs one timer per interval, not one per token."""

    def __init__(self, interval: float, on_silence: Callable[[], None]) -> None:
        self._interval = interval
        self._on_silence = on_silence
        self._since = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(interval, self._look)

    def broken(self) -> None:
        self._since = time.monotonic()

    def is_long(self) -> bool:
        return time.monotonic() - self._since >= self._interval

    def close(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        left = self._interval - (time.monotonic() - self._since)
        if left <= 0:
            self._on_silence()
        self._timer = asyncio.get_running_loop().call_later(left if left > 0 else self._interval, self._look)
