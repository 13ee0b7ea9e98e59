"""Which folder a worker's disk tier has: one of several below the configured one, for as long as the process lives.

A worker that starts again takes the first that nobody holds, so it finds what it, or one like it, has left. Folders of
another model or format are emptied, never read.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

MAX_FOLDERS = 1024
_LOCK = "lock"
_FINGERPRINT = "fingerprint"


class Folder:
    """Raises OSError where none can be had."""

    def __init__(self, base: str, fingerprint: str) -> None:
        Path(base).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = -1
        for number in range(MAX_FOLDERS):
            self.path = Path(base) / f"worker-{number}"
            self.path.mkdir(mode=0o700, exist_ok=True)
            if self._take():
                break
        else:
            raise OSError(f"all {MAX_FOLDERS} folders below {base} are in use")
        self._check(fingerprint)

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)  # which unlocks it
            self._lock = -1

    def _take(self) -> bool:
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            return False
        return True

    def _check(self, fingerprint: str) -> None:
        mark = self.path / _FINGERPRINT
        if mark.is_file() and mark.read_text() == fingerprint:
            return
        mark.unlink(missing_ok=True)
        for file in self.path.glob("slot-*"):
            file.unlink()
        mark.write_text(fingerprint)
