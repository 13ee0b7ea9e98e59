"""`python -m radixfleet.parent_watch PID`: ends that process when standard input ends, because the parent is dead.

A byte on standard input says that nothing has to be ended any more.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys


def start(pid: int) -> subprocess.Popen[bytes]:
    """A watcher that ends `pid` once this process is gone, however it went. Release it with `release`."""
    return subprocess.Popen(
        [sys.executable, "-m", "radixfleet.parent_watch", str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def release(watcher: subprocess.Popen[bytes]) -> None:
    """Let the watcher go without ending anything."""
    watcher.communicate(b"x")


def main() -> None:
    pid = int(sys.argv[1])
    if sys.stdin.buffer.read(1):
        return
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return  # it ended by itself


if __name__ == "__main__":
    main()
