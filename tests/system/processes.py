"""Looking at processes from outside: who lives below whom, and waiting for something to become true."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 60.0


def descendants(pid: int) -> dict[int, str]:
    """Process id -> command line of everything below `pid`."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
                commands[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError):
                continue
    found: dict[int, str] = {}
    todo = [pid]
    while todo:
        parent = todo.pop()
        for child, its_parent in parents.items():
            if its_parent == parent:
                found[child] = commands[child]
                todo.append(child)
    return found


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> bool:
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.05)
    return True
