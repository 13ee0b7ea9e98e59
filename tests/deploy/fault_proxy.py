"""A TCP proxy that misbehaves on request: delay, throttle, freeze, cut. Leaves what runs through it alone."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

BLOCK = 16 << 10


class FaultProxy:
    """`async with FaultProxy(host, port) as proxy`, then connect to `proxy.endpoint`.

    `delay_s` is added to every block in both directions; `bytes_per_s` limits each connection (0: none). `frozen()`
    passes nothing and breaks nothing, as a network that has lost a link; `cut()` breaks every connection at once.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self.delay_s = 0.0
        self.bytes_per_s = 0.0
        self.accepts = True
        self.connections = 0
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._flowing.set()
        self.cut()
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def freeze(self) -> None:
        self._flowing.clear()

    def thaw(self) -> None:
        self._flowing.set()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self.accepts:
            writer.transport.abort()
            return
        self.connections += 1
        there, back = await asyncio.open_connection(*self._target)
        self._writers |= {writer, back}
        pumps = [asyncio.create_task(self._pump(reader, back)), asyncio.create_task(self._pump(there, writer))]
        self._tasks.update(pumps)
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for end in (writer, back):
            self._writers.discard(end)
            end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Blocks on their way: one is read while those before it are still delayed, so that a delay costs no rate."""
        under_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(256)  # an empty block is the end
        loop = asyncio.get_running_loop()

        async def deliver() -> None:
            while True:
                due, block = await under_way.get()
                if not block:
                    return
                await asyncio.sleep(max(0.0, due - loop.time()))
                if self.bytes_per_s:
                    await asyncio.sleep(len(block) / self.bytes_per_s)
                await self._flowing.wait()
                writer.write(block)
                with contextlib.suppress(ConnectionError):
                    await writer.drain()

        delivering = asyncio.create_task(deliver())
        self._tasks.add(delivering)
        with contextlib.suppress(ConnectionError):
            while block := await reader.read(BLOCK):
                await under_way.put((loop.time() + self.delay_s, block))
        await under_way.put((0.0, b""))
        await delivering
