"""Keeps each thread of the CPU kernels on a core of its own. Leaves how many there are to `device`.

Threads that wake together after a pause are often put on one core by the system, where they meet by turns: the first
step after 50 ms of rest took 17 to 30 ms instead of 8. Only where every core has one of them: fewer threads may have to
make room for another worker's.
"""

from __future__ import annotations

import structlog
import torch

from services.gpu_worker import device as devices
from services.gpu_worker.kernels import NativeUnavailable, library
from services.gpu_worker.kv_cache import KVCache
from shared.config import WorkerConfig

log = structlog.get_logger()


def pin_threads(config: WorkerConfig, kv_cache: KVCache) -> bool:
    """To be called in the compute thread; whether it and those that help it are each on their core from now on.

    Threads that it starts later stay where it is.
    """
    cores = devices.cores_allowed()
    is_whole = config.tp_size == 1 and 1 < len(cores) == torch.get_num_threads()
    if config.disable_thread_pinning or not is_whole or kv_cache.layers[0].device.type != "cpu":
        return False
    try:
        kernels = library.load()
    except NativeUnavailable:
        return False
    torch.zeros(1 << 20).add_(1)  # torch's own helpers are there now
    width = max(map(len, cores))
    table = torch.tensor([core + [-1] * (width - len(core)) for core in cores], dtype=torch.int32)
    failed = kernels.functions.rf_pin_threads(table.data_ptr(), width, len(cores))
    if failed:
        log.info("threads are not kept on their cores", failed=failed)
    return not failed
