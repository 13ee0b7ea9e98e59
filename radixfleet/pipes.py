"""Pipes on which children say one byte at a time: I am alive, I am ready. Leaves the meaning to the listener."""

from __future__ import annotations

import asyncio
import os


class ByteListener:
    """The read end on the event loop. Pass `write_fd` to one child, then `close_write_end()` here."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._open = True
        self._writable = True
        self.last_heard: float | None = None
        self.first_byte: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(self._read_fd, self._on_readable)

    def close_write_end(self) -> None:
        """Afterwards only the child holds it, so that its end is the end of file."""
        if self._writable:
            self._writable = False
            os.close(self.write_fd)

    def close(self) -> None:
        self.close_write_end()
        if self._open:
            self._open = False
            self._loop.remove_reader(self._read_fd)
            os.close(self._read_fd)

    def _on_readable(self) -> None:
        try:
            data = os.read(self._read_fd, 4096)
        except BlockingIOError:
            return
        if not data:
            self.close()
            return
        self.last_heard = self._loop.time()
        if not self.first_byte.done():
            self.first_byte.set_result(None)
