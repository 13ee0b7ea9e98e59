"""The growing text of a program for whoever watches it: readers in threads and in event loops.

Writers append; a reader keeps its own place, so several can follow one program. Leaves meaning to the executor.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Chunk:
    """New text; `name` is the variable it belongs to, None for constants."""

    text: str
    name: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)


class Log:
    """Shares its condition with the run, so that one wait covers text, ends and errors."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._chunks: list[Chunk] = []
        self._waiting: set[Callable[[], None]] = set()

    def append(self, chunk: Chunk) -> None:
        with self._changed:
            self._chunks.append(chunk)
        self.wake()

    def wake(self) -> None:
        """Something else changed that readers wait for."""
        with self._changed:
            self._changed.notify_all()
            waiting, self._waiting = self._waiting, set()
        for call in waiting:
            call()

    def follow(self, ended: Callable[[], bool]) -> Iterator[Chunk]:
        """Chunks as they come, until `ended()`, which may raise. It is called under the condition."""
        at = 0
        while True:
            with self._changed:
                while at >= len(self._chunks) and not ended():
                    self._changed.wait()
                news = self._chunks[at:]
            if not news:
                return
            at += len(news)
            yield from news

    async def follow_async(self, ended: Callable[[], bool]) -> AsyncIterator[Chunk]:
        """The same for an event loop, which is never blocked."""
        at = 0
        while True:
            with self._changed:
                news = self._chunks[at:]
                over = not news and ended()
                woken = asyncio.Event()
                call = _waker(asyncio.get_running_loop(), woken)
                if not news and not over:
                    self._waiting.add(call)
            if over:
                return
            if not news:
                try:
                    await woken.wait()
                finally:
                    self._forget(call)
                continue
            at += len(news)
            for chunk in news:
                yield chunk

    async def wait_async(self, ready: Callable[[], bool]) -> None:
        """Until `ready()`, which is called under the condition and may raise."""
        while True:
            woken = asyncio.Event()
            call = _waker(asyncio.get_running_loop(), woken)
            with self._changed:
                if ready():
                    return
                self._waiting.add(call)
            try:
                await woken.wait()
            finally:
                self._forget(call)

    def _forget(self, call: Callable[[], None]) -> None:
        with self._changed:
            self._waiting.discard(call)


def _waker(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> Callable[[], None]:
    def wake() -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(event.set)

    return wake
