"""Starts one worker process: `python -m services.gpu_worker --model-path DIR --scheduler ENDPOINT`."""

from __future__ import annotations

import os
import sys

import zmq

from services.gpu_worker.device import set_thread_environment
from shared import config, service


def main() -> int:
    """Run until drained, refused or killed; returns the exit code."""
    settings = config.load(config.WorkerConfig, sys.argv[1:])
    set_thread_environment(settings.threads)
    from services.gpu_worker.worker import Worker  # imports torch, which reads that environment

    worker = Worker(settings)
    code = max(service.run("worker", settings, lambda: worker), worker.exit_code)
    sys.stderr.flush()
    if worker.is_computing:
        os._exit(code)  # a load or a forward that nobody waits for any more
    zmq.Context.instance().term()  # last messages leave
    return code


if __name__ == "__main__":
    sys.exit(main())
