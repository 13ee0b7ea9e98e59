"""The cache folder: where it is, one builder per entry, entries that are whole or absent. Knows no models."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from radixfleet.models.progress import Progress


def cache_root() -> Path:
    """$RADIXFLEET_CACHE, else the user's cache folder (XDG)."""
    own = os.environ.get("RADIXFLEET_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME")
    base = Path(xdg) if xdg and Path(xdg).is_absolute() else Path.home() / ".cache"
    return base / "radixfleet"


def build_once(target: Path, build: Callable[[Path], None], say: Progress) -> Path:
    """`target`, built by `build(folder)` unless it is already there.

    The folder is built beside its place and renamed, so a killed builder leaves nothing half done;
    of two processes that start together one builds and the other waits for it.
    """
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f".{target.name}.lock"), say):
        if target.is_dir():
            return target
        _remove_leftovers(target)
        draft = Path(tempfile.mkdtemp(prefix=f".{target.name}.draft-", dir=target.parent))
        try:
            build(draft)
            draft.chmod(0o755)
            draft.rename(target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    return target


def _remove_leftovers(target: Path) -> None:
    # Under the lock every draft of this entry belongs to a builder that died.
    for draft in target.parent.glob(f".{target.name}.draft-*"):
        shutil.rmtree(draft, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, say: Progress) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is preparing this model, waiting for it")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
