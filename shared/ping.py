"""`python -m shared.ping ENDPOINT`: one Ping to a service, answered through its main loop; for health checks.

Exit code 0: healthy; 1: no answer in time, or it says that it is not healthy. Leaves HTTP services to curl.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys

import uvloop

from shared import curve
from shared.messages.control import Ping, Pong
from shared.transport import Client

DEFAULT_TIMEOUT_S = 3.0


async def ask(endpoint: str, seconds: float, server: str = "scheduler") -> Pong:
    """The service's answer. Raises TimeoutError after `seconds`."""
    answer: asyncio.Future[Pong] = asyncio.get_running_loop().create_future()
    nonce = int.from_bytes(os.urandom(4))

    def on_message(message: Pong, frames: list[bytes]) -> None:
        if message.nonce == nonce and not answer.done():
            answer.set_result(message)

    client: Client[Pong] = Client(endpoint, f"ping/{nonce}", Pong, on_message, server=server)

    def send() -> None:
        client.try_send(Ping(nonce))  # a failed send comes back here once the connection may be there

    client.on_writable = send
    try:
        async with asyncio.timeout(seconds):
            send()
            return await answer
    finally:
        client.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="radixfleet ping", description="Ask a service whether it works.")
    parser.add_argument("endpoint", help="tcp://HOST:PORT or ipc://PATH of a service")
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, help="seconds to wait [3]")
    parser.add_argument("--curve-dir", default=os.environ.get("RADIXFLEET_CURVE_DIR", ""), help="folder with keys")
    parser.add_argument("--server", choices=curve.KINDS, default="scheduler", help="whose key to expect [scheduler]")
    parser.add_argument("--as", dest="name", choices=curve.KINDS, help="whose key to show [the server's]")
    options = parser.parse_args(argv)
    try:
        if options.curve_dir and options.endpoint.startswith("tcp://"):
            curve.use(curve.load(options.curve_dir, options.name or options.server))
        pong = uvloop.run(ask(options.endpoint, options.timeout, options.server))
    except curve.KeysUnusable as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except TimeoutError:
        sys.stderr.write(f"no answer from {options.endpoint} within {options.timeout:g} s\n")
        return 1
    finally:
        curve.close()
    if pong.detail:
        sys.stdout.write(f"{pong.detail}\n")
    return 0 if pong.healthy else 1


if __name__ == "__main__":
    sys.exit(main())
