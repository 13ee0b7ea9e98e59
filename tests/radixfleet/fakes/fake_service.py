"""A service that does nothing but live: what the launcher is tested with. Run as `-m fake_service`.

$FAKE_<ID> chooses how one of them misbehaves: fail (at every start), fail-later (at every start but the first),
stubborn (never drains), silent (never ready), broken (the door answers with errors).
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys

from shared.config import ServiceConfig, load
from shared.service import announce_ready, run

NAME = os.environ["RADIXFLEET_SERVICE_ID"]
BEHAVIOUR = os.environ.get("FAKE_" + NAME.replace("-", "_").upper(), "")
MARKS = os.environ["FAKE_MARKS"]


def tell(what: str) -> None:
    sys.stderr.write(f"fake {NAME} {what} {os.getpid()}\n")
    sys.stderr.flush()


class Fake:
    async def start(self) -> None:
        tell("started")
        mark = os.path.join(MARKS, NAME)
        again = os.path.exists(mark)
        with open(mark, "a"):
            pass
        if BEHAVIOUR == "fail" or (BEHAVIOUR == "fail-later" and again):
            raise RuntimeError("told to fail")
        if "RADIXFLEET_HTTP_FD" in os.environ:
            listener = socket.socket(fileno=int(os.environ["RADIXFLEET_HTTP_FD"]))
            listener.setblocking(False)
            self.server = await asyncio.start_server(self._answer, sock=listener)
        if BEHAVIOUR != "silent":
            announce_ready()

    async def drain(self) -> None:
        tell("drains")
        if BEHAVIOUR == "stubborn":
            await asyncio.Event().wait()

    async def close(self) -> None:
        tell("closed")

    def heartbeat(self) -> None:
        pass

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        status = "500 Broken" if BEHAVIOUR == "broken" else "200 OK"
        writer.write(f"HTTP/1.1 {status}\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode())
        await writer.drain()
        writer.close()


if __name__ == "__main__":
    config = load(ServiceConfig)
    sys.exit(run(NAME, config, Fake))
