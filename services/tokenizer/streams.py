"""Who waits for which text: streams by request id, grouped by the HTTP request they belong to.

What arrives faster than a client reads is merged, so that memory follows the number of tokens. Leaves
sockets to frontend and the words of the APIs to render/.

    TextChunk -> StreamTable -> Stream (drops what it has) -> Output (merged) -> Group.wait() wakes the exchange
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Iterator

import msgspec
import structlog

from services.tokenizer.calls import Call
from services.tokenizer.errors import ApiError, from_finish
from services.tokenizer.output import Output, ScoreColumns
from shared import ints
from shared.messages.request import GenerateRequest
from shared.messages.stream import Scores, TextChunk

log = structlog.get_logger(__name__)

LEAST_TIME_S = 0.001  # of a request whose time is over: its scheduler says so


class Stream:
    """One choice: what it has received, and what its reader has not taken yet."""

    __slots__ = (
        "_cached",
        "_chars",
        "_fresh",
        "_ids",
        "_k",
        "_m",
        "_until",
        "done",
        "error",
        "group",
        "index",
        "names",
        "request",
        "resubmitted",
        "settled",
        "waiting",
    )

    def __init__(self, request: GenerateRequest, group: Group, index: int, names: tuple[str, ...]) -> None:
        self.request = request
        self.group = group
        self.index = index
        self.names = names  # by which callers may abort it
        self.done = False  # nothing more comes to the reader
        self.settled = False  # the scheduler has said its last word; else it must be told when nobody waits any more
        self.error: ApiError | None = None
        self.resubmitted = False
        self.waiting = False  # in the group's queue of streams with news
        self._ids: array[int] = array("i")  # all received so far: what a resumed request starts with
        self._chars = 0
        self._cached: int | None = None
        self._k = max(request.sampling.logprobs, 0)
        self._m = ints.count(request.sampling.logprob_token_ids)
        self._fresh: Output | None = None
        self._until = 0.0  # when its time is over; 0: never

    def accept(self, chunk: TextChunk) -> None:
        """Merge one chunk; what is already there is cut off by offset, a gap ends the stream."""
        have = len(self._ids)
        if self.done or (chunk.offset < have and not chunk.reopened):
            return
        if chunk.offset > have:
            log.error("tokens are missing", request_id=self.request.request_id, have=have, offset=chunk.offset)
            self.fail(ApiError(500, "Tokens of this answer were lost."))
            return
        fresh = self._fresh or Output(self._k, self._m)
        new_ids = ints.unpack(chunk.token_ids)[have - chunk.offset :]
        text = chunk.text[self._chars :] if chunk.reopened else chunk.text
        fresh.token_ids += new_ids
        fresh.text += text
        self._ids += new_ids
        self._chars += len(text)
        if self._cached is None or not self.resubmitted:  # a new scheduler finds more than the first one did
            self._cached = chunk.cached_tokens  # 0 while forced tokens come before its admission
        fresh.cached_tokens = self._cached
        if chunk.scores is not None:
            fresh.scores.extend(chunk.scores, skip=max(chunk.scores.count - len(new_ids), 0))
        if chunk.prompt_scores is not None:
            fresh.prompt_scores = self._columns(chunk.prompt_scores)
        fresh.take_counts(chunk)
        self._fresh = fresh
        if chunk.finish is not None:
            self.done = self.settled = True
            self.error = from_finish(chunk.finish)
        self.group.wake(self)

    def fail(self, error: ApiError) -> None:
        """End the stream here; the first failure stays."""
        if not self.done:
            self.done = True
            self.error = error
            self.group.wake(self)

    @property
    def widths(self) -> tuple[int, int]:
        """Top entries and wanted entries per scored token."""
        return self._k, self._m

    @property
    def received(self) -> int:
        """Tokens received so far."""
        return len(self._ids)

    def take(self) -> Output | None:
        """What is new since the last call."""
        fresh, self._fresh = self._fresh, None
        return fresh

    def belong(self, call: Call) -> None:
        """Give the request to its caller: id, cache, budget and time. Raises ApiError where no time is left."""
        request = self.request
        left = call.time_left()
        self._until = time.monotonic() + left if left else 0.0
        self.request = msgspec.structs.replace(
            request,
            request_id=call.request_id(request.request_id),
            tenant=call.tenant,
            namespace=call.namespace(request.namespace),
            names=self.names,
            counted=call.counts(),
            deadline_s=left,
            traceparent=call.traceparent,
        )

    def stamp(self, frontend_id: str, epoch: int) -> GenerateRequest:
        """The request as it leaves: with its sender and the scheduler life it was made for."""
        self.request = msgspec.structs.replace(self.request, frontend_id=frontend_id, epoch=epoch)
        return self.request

    def resumed(self, epoch: int) -> GenerateRequest:
        """The request as a new scheduler must see it: with every token already here."""
        self.resubmitted = True
        left = max(self._until - time.monotonic(), LEAST_TIME_S) if self._until else 0.0
        return msgspec.structs.replace(
            self.request, epoch=epoch, output_ids=ints.pack(self._ids), deadline_s=left, counted=False
        )

    def _columns(self, scores: Scores) -> ScoreColumns:
        columns = ScoreColumns(self._k, self._m)
        columns.extend(scores)
        return columns


class Group:
    """All streams of one HTTP request and the one reader that waits for them."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self._ready: deque[Stream] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.writer: asyncio.Task[object] | None = None
        self.writing_since: float | None = None  # when the write that still waits for its client began
        self.unwanted = False  # an abort has named it: nothing may go on from where it ends

    @property
    def time_left(self) -> float:
        """Seconds its requests were given when they were sent; 0: any."""
        return self.streams[0].request.deadline_s if self.streams else 0.0

    def time_out(self) -> None:
        """End what has not ended."""
        for stream in self.streams:
            stream.fail(ApiError(408 if stream.received else 504, "The request timed out."))

    def add(self, request: GenerateRequest, names: tuple[str, ...]) -> None:
        self.streams.append(Stream(request, self, len(self.streams), names))

    @property
    def done(self) -> bool:
        return all(stream.done for stream in self.streams)

    @property
    def has_news(self) -> bool:
        return bool(self._ready)

    def wake(self, stream: Stream) -> None:
        if not stream.waiting:
            stream.waiting = True
            self._ready.append(stream)
        self.nudge()

    def nudge(self) -> None:
        """Let the reader look around, even with nothing new."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Until a stream has news or somebody nudged."""
        if not self._ready:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def take_ready(self) -> Iterator[Stream]:
        """Streams with news, in the order of their arrival."""
        while self._ready:
            stream = self._ready.popleft()
            stream.waiting = False
            yield stream


class StreamTable:
    """Live streams by request id, and the names by which their callers know them: each is in use once."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self._names: set[str] = set()

    def __len__(self) -> int:
        return len(self._streams)

    def add(self, group: Group) -> None:
        """Raises ApiError where a name or request id is already in use; then nothing was added."""
        for stream in group.streams:
            for name in (stream.request.request_id, *_names_of(stream)):
                if name in self._streams or name in self._names:
                    shown = name.removeprefix(f"{stream.request.tenant}:")
                    text = f"A request with the id {shown!r} is running."
                    raise ApiError(400, text, param="rid", code="duplicate_id")
        for stream in group.streams:
            self._streams[stream.request.request_id] = stream
            self._names.update(_names_of(stream))

    def discard(self, group: Group) -> list[Stream]:
        """Forget a group; returns the streams that were here, none where it was never added."""
        gone = [s for s in group.streams if self._streams.get(s.request.request_id) is s]
        for stream in gone:
            del self._streams[stream.request.request_id]
            self._names.difference_update(_names_of(stream))
        return gone

    def get(self, request_id: str) -> Stream | None:
        return self._streams.get(request_id)

    def live(self) -> list[Stream]:
        return [stream for stream in self._streams.values() if not stream.done]

    def give_up(self, name: str, tenant: str) -> None:
        """Let nothing follow the tenant's groups of this name; an empty tenant means anybody's."""
        for group in self.groups():
            if any(name in s.names and tenant in ("", s.request.tenant) for s in group.streams):
                group.unwanted = True

    def groups(self) -> set[Group]:
        return {stream.group for stream in self._streams.values()}


def _names_of(stream: Stream) -> list[str]:
    """Its callers' names, set apart from those of other tenants as request ids are."""
    tenant = stream.request.tenant
    return [f"{tenant}:{name}" if tenant else name for name in stream.names]
