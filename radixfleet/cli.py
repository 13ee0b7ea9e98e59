"""`radixfleet COMMAND`: picks the command, prints what it has to say. Imports nothing heavy before it is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from radixfleet.errors import CommandError
from radixfleet.version import __version__

USAGE = """usage: radixfleet COMMAND [FLAGS]

  serve        start everything on this machine (the flags: radixfleet serve --help)
  tokenizer    start one service, to spread them over hosts
  scheduler
  worker
  detokenizer
  models       make a model available and print its folder
  prepare      make keys and a model available before services start in containers
  keygen       make keys for the sockets between hosts
  ping         ask a service whether it works: radixfleet ping tcp://HOST:PORT

  --version    print the version
  --help       print this
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    if name in ("--help", "-h", "help"):
        print(USAGE, end="")
        return 0 if words else 2
    if name in ("--version", "version"):
        print(f"radixfleet {__version__}")
        return 0
    command = _COMMANDS.get(name)
    if command is None:
        print(f"radixfleet: error: no command {name!r}\n\n{USAGE}", end="", file=sys.stderr)
        return 2
    try:
        return command(name, words[1:])
    except CommandError as error:
        print(f"radixfleet: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _serve(name: str, argv: Sequence[str]) -> int:
    from radixfleet import launch, options

    return launch.serve(options.parse(argv))


def _service(name: str, argv: Sequence[str]) -> int:
    from radixfleet.single import run_service

    return run_service(name, argv)


def _ping(name: str, argv: Sequence[str]) -> int:
    from radixfleet.single import ping

    return ping(argv)


def _models(name: str, argv: Sequence[str]) -> int:
    from radixfleet.models.__main__ import main as models

    return models(list(argv))


def _keygen(name: str, argv: Sequence[str]) -> int:
    from radixfleet.keygen import main as keygen

    return keygen(argv)


def _prepare(name: str, argv: Sequence[str]) -> int:
    from radixfleet.prepare import main as prepare

    return prepare(argv)


_COMMANDS: dict[str, Callable[[str, Sequence[str]], int]] = {
    "serve": _serve,
    "tokenizer": _service,
    "scheduler": _service,
    "worker": _service,
    "detokenizer": _service,
    "models": _models,
    "ping": _ping,
    "keygen": _keygen,
    "prepare": _prepare,
}
