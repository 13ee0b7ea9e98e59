"""Starts one worker process: `python -m services.gpu_worker --model-path DIR --scheduler ENDPOINT`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import zmq

from services.gpu_worker.device import set_thread_environment, threads_of
from shared import service
from shared.config import WorkerConfig, load

if TYPE_CHECKING:
    from services.gpu_worker.startup import StartedEngine


def main() -> int:
    """Run with the configuration of flags and environment; returns the exit code."""
    return run(load(WorkerConfig, sys.argv[1:]))


def run(config: WorkerConfig, start: Callable[[WorkerConfig], StartedEngine] | None = None) -> int:
    """Run until drained, refused or killed; `start` replaces the loading of a model."""
    set_thread_environment(threads_of(config))
    # These import torch, which reads that environment.
    if config.tp_rank > 0:
        from services.gpu_worker.parallel import follower

        code = follower.run(config)
        sys.stderr.flush()
        os._exit(code)  # the group's own threads may wait for ranks that are gone
    from services.gpu_worker.pinning import pin_threads
    from services.gpu_worker.startup import start_engine
    from services.gpu_worker.worker import Worker

    worker = Worker(config, start) if start else Worker(config, start_engine, settle_down=pin_threads)
    code = max(service.run("worker", config, lambda: worker), worker.exit_code)
    sys.stderr.flush()
    if worker.is_computing:
        os._exit(code)  # a load or a forward that nobody waits for any more
    zmq.Context.instance().term()  # last messages leave
    if worker.device_lost:
        os._exit(code)  # the interpreter's end would free what a lost context holds, which may hang
    return code


if __name__ == "__main__":
    sys.exit(main())
