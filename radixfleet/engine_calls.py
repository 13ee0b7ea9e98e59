"""/generate without HTTP in the caller's hands, for threads and for event loops. Leaves connections to the endpoint."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from radixfleet.backend.endpoint import RuntimeEndpoint


def body_of(prompt: Any, sampling_params: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """The request body; nothing of the caller's is changed."""
    body = {name: value for name, value in fields.items() if value is not None}
    if prompt is not None:
        body["text"] = prompt
    if sampling_params is not None:
        body["sampling_params"] = sampling_params
    return body


def generate(
    endpoint: RuntimeEndpoint, prompt: str | Sequence[str] | None, sampling_params: Any, fields: dict[str, Any]
) -> Any:
    """The whole answer, or an iterator of events where `stream` is among the fields."""
    body = body_of(prompt, sampling_params, fields)
    return endpoint.events("/generate", body) if body.get("stream") else endpoint.request("/generate", body)


async def generate_async(
    endpoint: RuntimeEndpoint, prompt: str | Sequence[str] | None, sampling_params: Any, fields: dict[str, Any]
) -> Any:
    """The same without blocking the loop."""
    body = body_of(prompt, sampling_params, fields)
    if body.get("stream"):
        return _events(endpoint.events("/generate", body))
    return await asyncio.to_thread(endpoint.request, "/generate", body)


async def _events(events: Iterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """A blocking iterator, read by a thread that never runs ahead by more than what the loop has not taken yet."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[dict[str, Any] | BaseException | None] = asyncio.Queue()
    given_up = threading.Event()

    def read() -> None:
        end: BaseException | None = None
        try:
            for event in events:
                if given_up.is_set():
                    break
                loop.call_soon_threadsafe(queue.put_nowait, event)
        except BaseException as error:
            end = error
        if not given_up.is_set():
            loop.call_soon_threadsafe(queue.put_nowait, end)

    threading.Thread(target=read, name="radixfleet-events", daemon=True).start()
    try:
        while (item := await queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        given_up.set()
