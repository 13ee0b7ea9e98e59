"""Which device and how many threads; leaves memory to `memory`. The core count is found without importing torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from shared.config import WorkerConfig

if TYPE_CHECKING:
    import torch

SPIN_COUNT = "3000"
_CPUS = Path("/sys/devices/system/cpu")


def physical_cores() -> int:
    """Cores this process may use, hyper-threads counted once, at least 1."""
    cores = len(cores_allowed())
    return max(1, min(cores, _quota() or cores))


def cores_allowed() -> list[list[int]]:
    """The processors of each core this process may run on."""
    cores: dict[str, list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        cores.setdefault(_siblings(cpu), []).append(cpu)
    return list(cores.values())


def threads_of(config: WorkerConfig) -> int:
    """Threads of this process; ranks on one machine share its cores."""
    if config.threads or config.tp_size == 1:
        return config.threads
    return max(1, physical_cores() // config.tp_size)


def set_thread_environment(threads: int) -> None:
    """How threads wait and how many there are, for OpenMP runtimes that read it when torch is imported.

    They sleep between steps; inside one they meet some hundred times and look a moment (about 0.1 ms) before they
    sleep, since waking up takes as long. Values the user has set stay.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    os.environ.setdefault("KMP_BLOCKTIME", "0")
    os.environ.setdefault("OMP_NUM_THREADS", str(threads or physical_cores()))


def set_torch_threads(threads: int) -> int:
    """Let torch use `threads` (0: all physical cores) from the calling thread on; returns the number."""
    import torch

    number = threads or physical_cores()
    torch.set_num_threads(number)
    return number


def resolve(name: str, rank: int = 0) -> torch.device:
    """The device for `auto`, `cpu` or `cuda`; ranks on one machine take one GPU each.

    Raises SystemExit where cuda is asked for and missing.
    """
    import torch

    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit("radixfleet: --device cuda, but torch finds no CUDA device")
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        torch.cuda.set_device(rank % torch.cuda.device_count())
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _siblings(cpu: int) -> str:
    try:
        return (_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> int:
    # Where a container has fewer cores than the machine, more threads only wait for their share.
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return 0
    return 0 if quota == "max" else max(1, int(quota) // int(period))
