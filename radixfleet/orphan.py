"""A helper process that must not outlive the launcher. Services have their own way (shared.service)."""

from __future__ import annotations

import os
import signal
import threading

PARENT_FD = "RADIXFLEET_PARENT_FD"


def die_with_parent() -> None:
    """Kill this process group once the other end of the inherited pipe is closed; does nothing without one."""
    raw = os.environ.pop(PARENT_FD, None)
    if raw is None:
        return

    def wait_for_end_of_file() -> None:
        while os.read(int(raw), 1):
            pass
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=wait_for_end_of_file, name="parent-watch", daemon=True).start()
