"""The one thread that runs the model, fed in order by the event loop; leaves what is run to the worker."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
Job = Callable[[], None]


class ComputeThread:
    """Jobs run one after the other. A daemon: a load or a forward that hangs never holds up the end of the process."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._ended = asyncio.Event()
        # Within the caller's context, so that log lines carry the service's name.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="compute", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether something still runs in the thread, or may."""
        return self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Run `job` after all earlier ones; it must not raise."""
        self._jobs.put(job)

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` in the thread and wait for its result or exception."""
        future: asyncio.Future[T] = self._loop.create_future()

        def job() -> None:
            try:
                result = function()
            except BaseException as error:  # whatever it is, it belongs to the caller
                self.post(_settle, future, None, error)
            else:
                self.post(_settle, future, result, None)

        self.submit(job)
        return await future

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Run `callback` in the event loop; nothing happens where the loop has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *args)

    async def stop(self, seconds: float) -> bool:
        """Let the thread end after the queued jobs; False where it still runs after `seconds`."""
        self._jobs.put(None)
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            return False
        self._thread.join()
        return True

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
        self.post(self._ended.set)


def _settle(future: asyncio.Future[T], result: T, error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    elif isinstance(error, Exception):
        future.set_exception(error)
    else:
        future.set_exception(RuntimeError(str(error)))
