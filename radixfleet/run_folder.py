"""The private folder in which the services of one `serve` meet; leaves its sockets to them."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

LONGEST_SOCKET_PATH = 107  # sun_path holds 108 bytes with its zero
_LONGEST_NAME = "/detokenizer.sock"


class RunFolderError(Exception):
    """No folder for the sockets; the text says why."""


@contextlib.contextmanager
def run_folder(parent: str | None) -> Iterator[Path]:
    """A new folder of mode 0700 inside `parent` (None: the user's runtime folder), gone afterwards.

    Always a new one, so that late services of a killed launcher cannot take away the folder of the next.
    Raises RunFolderError.
    """
    folder = _make_in(Path(parent).expanduser().absolute()) if parent else _make_anywhere()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _make_anywhere() -> Path:
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):  # noqa: S108 - mkdtemp is private
        if base and os.access(base, os.W_OK | os.X_OK):
            with contextlib.suppress(RunFolderError):
                return _make_in(Path(base))
    raise RunFolderError("no writable folder with a short path to put sockets in; name one with --run-dir")


def _make_in(parent: Path) -> Path:
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="radixfleet-", dir=parent))
    except OSError as error:
        raise RunFolderError(f"{parent}: {error.strerror}") from error
    if len(os.fsencode(folder)) + len(_LONGEST_NAME) > LONGEST_SOCKET_PATH:
        folder.rmdir()
        raise RunFolderError(f"{folder} is too long: socket paths have at most {LONGEST_SOCKET_PATH} bytes")
    return folder
