"""Claims a GPU that no other container of this machine has, then becomes the given program.

    claim_gpu.py FOLDER PROGRAM ARGUMENTS...

FOLDER is shared by all replicas. The claim is a lock on a file in it, held by the process itself: however it ends, the
next one may have the GPU. CUDA_VISIBLE_DEVICES, where it is set, says which GPUs there are.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterable
from pathlib import Path


def claim(folder: Path, gpus: Iterable[str]) -> str | None:
    """The first free one, locked until this process and whoever inherits its files has ended."""
    for gpu in gpus:
        lock = os.open(folder / f"{gpu}.lock", os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
        else:
            os.set_inheritable(lock, True)
            return gpu
    return None


def visible(devices: Path = Path("/dev")) -> list[str]:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    return [str(number) for number, _ in enumerate(sorted(devices.glob("nvidia[0-9]*")))]


def main(argv: list[str]) -> int:
    gpus = visible()
    gpu = claim(Path(argv[0]), gpus)
    if gpu is None:
        sys.stderr.write(f"all of the {len(gpus)} GPUs of this machine have a worker already\n")
        return 1
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    os.execvp(argv[1], argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
