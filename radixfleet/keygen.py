"""`radixfleet keygen --dir D`: CURVE keys for the sockets between hosts. Leaves using them to the services.

D/NAME.key           public: every host gets all of them
D/NAME.key_secret    secret, mode 600: a host gets those of the services it runs
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import zmq.auth

from radixfleet.errors import CommandError

KINDS = ("tokenizer", "scheduler", "worker", "detokenizer")
_NAME = re.compile(rf"({'|'.join(KINDS)})(-[A-Za-z0-9_.]+)?")


def main(argv: Sequence[str]) -> int:
    """Returns the exit code. Raises CommandError."""
    parser = argparse.ArgumentParser(prog="radixfleet keygen", description="Make CURVE keys for tcp between hosts.")
    parser.add_argument("--dir", required=True, type=Path, help="folder for the keys, made with mode 700")
    parser.add_argument("names", nargs="*", metavar="NAME", help="KIND or KIND-WORD [one of each kind]")
    options = parser.parse_args(list(argv))
    for name in make_keys(options.dir, options.names or KINDS):
        sys.stdout.write(f"{options.dir / name}.key\n")
    return 0


def make_keys(folder: Path, names: Sequence[str]) -> list[str]:
    """Pairs for those names that have none yet; returns these. Raises CommandError."""
    bad = [name for name in names if not _NAME.fullmatch(name)]
    if bad:
        raise CommandError(f"{bad[0]!r} is no name of a key: it begins with one of {', '.join(KINDS)}")
    umask = os.umask(0o077)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        made = [name for name in names if not (folder / f"{name}.key_secret").exists()]
        for name in made:
            zmq.auth.create_certificates(folder, name)
            (folder / f"{name}.key").chmod(0o644)
    except OSError as error:
        raise CommandError(f"{folder}: {error.strerror}") from error
    finally:
        os.umask(umask)
    return made
