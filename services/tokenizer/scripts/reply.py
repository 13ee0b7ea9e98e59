"""The answer to /script: a stream of named parts, or all of them at once. Leaves running the steps to chain.

data: {"part": 0, "name": "a", "delta": " Par"}                                    new text
data: {"part": 0, "name": "a", "text": " Paris", "output_ids": [...], ...}         a part is complete
data: {"meta_info": {"id": ..., "parts": 2, "completion_tokens": 9, ...}}          all are
data: [DONE]
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import structlog
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from services.tokenizer import sse
from services.tokenizer.errors import ApiError, ClientGone
from services.tokenizer.exchange import ADMISSION_WAIT_S, COMPILE_WAIT_S, Silence
from services.tokenizer.metrics import RequestTimer
from services.tokenizer.scripts.body import ScriptBody
from services.tokenizer.scripts.chain import Chain, Event

log = structlog.get_logger(__name__)


class ScriptReply(Response):
    """An ASGI response, so that one `finally` covers all ways a script can end."""

    def __init__(
        self, chain: Chain, body: ScriptBody, timer: RequestTimer, keep_alive: float, headers: Mapping[str, str]
    ) -> None:
        super().__init__(headers=dict(headers))
        self._chain = chain
        self._timer = timer
        self._streaming = bool(body.stream)
        self._names = [step.work.name for step in body.steps if step.work is not None]
        self._keep_alive = keep_alive
        self._extra_headers = dict(headers)
        self._parts: list[dict[str, Any]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._chain.begin()
            response = await self._stream() if self._streaming else await self._whole(receive)
            await response(scope, receive, send)
        except ClientGone:
            log.debug("client gone", script=self._chain.rid)
        finally:
            self._chain.close()
            self._timer.close(finished=self._chain.complete)

    async def _whole(self, receive: Receive) -> Response:
        watcher = asyncio.ensure_future(self._watch(receive))
        try:
            async for event in self._chain.events():
                self._note(event)
        finally:
            watcher.cancel()
        body = sse.json_bytes({"parts": self._parts, "meta_info": self._totals()})
        return Response(body, 200, self._extra_headers, "application/json")

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._chain.gone = True
        self._chain.nudge()

    async def _stream(self) -> Response:
        """Headers go out with the first news, or soon without: until then a refusal still has its status."""
        events = self._chain.events()
        loop = asyncio.get_running_loop()
        patience = COMPILE_WAIT_S if self._chain.compiles else ADMISSION_WAIT_S
        timer = loop.call_later(patience, self._chain.nudge)
        first = await anext(events)
        timer.cancel()
        headers = {**sse.HEADERS, **self._extra_headers}
        return StreamingResponse(self._bytes(first, events), 200, headers, sse.MEDIA_TYPE)

    async def _bytes(self, first: Event, events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
        chain, event = self._chain, first
        silence = Silence(self._keep_alive, chain.nudge)
        try:
            while True:
                data = self._note(event)
                if data or silence.is_long():
                    self._writing(time.monotonic())
                    yield data or sse.KEEP_ALIVE
                    self._writing(None)
                    silence.broken()
                following = await anext(events, None)
                if following is None:
                    break
                event = following
            yield sse.event({"meta_info": self._totals()}) + sse.DONE
        except ApiError as failure:
            yield _failed(failure) + sse.DONE
        finally:
            silence.close()

    def _writing(self, since: float | None) -> None:
        """For whoever looks after clients that read nothing."""
        group = self._chain.group
        if group is not None:
            group.writer, group.writing_since = asyncio.current_task(), since

    def _note(self, event: Event) -> bytes:
        """Remember a whole part; the event's bytes, none where it says nothing."""
        head = {"part": event.part, "name": self._names[event.part]}
        if event.whole is not None:
            self._parts.append({**head, **event.whole})
            return sse.event(self._parts[-1])
        return sse.event({**head, "delta": event.text}) if event.text else b""

    def _totals(self) -> dict[str, Any]:
        metas = [part["meta_info"] for part in self._parts]
        names = ("prompt_tokens", "completion_tokens", "cached_tokens", "total_retractions")
        return {
            "id": self._chain.rid,
            "parts": len(metas),
            **{name: sum(meta[name] for meta in metas) for name in names},
            "e2e_latency": time.monotonic() - self._timer.started,
        }


def _failed(failure: ApiError) -> bytes:
    """A failure in mid-stream, in the usual envelope, with the status it would have had before."""
    body = msgspec.json.decode(failure.body())
    body["error"]["status"] = failure.status
    return sse.event(body)
