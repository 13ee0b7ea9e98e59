"""Ranks beyond the first: `python -m services.gpu_worker.parallel.follower`, with the flags of rank 0 and --tp-rank.

Does what rank 0 says until rank 0 is gone; any failure ends it, and with it the group. Leaves sampling to rank 0.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Protocol

import numpy as np
import structlog

from services.gpu_worker.device import set_thread_environment
from shared import logging as service_logging
from shared.config import WorkerConfig, load

log = structlog.get_logger(__name__)


class Follows(Protocol):
    """What a rank's engine must do."""

    def follow(self, command: object) -> None: ...


def main() -> int:
    """Returns the exit code: 0 where rank 0 has ended."""
    config = load(WorkerConfig, sys.argv[1:])
    service_logging.configure("worker", config.log_level, config.log_format)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; rank 0 drains, and ends us by leaving
    set_thread_environment(config.threads)
    from services.gpu_worker.parallel.start import start_rank  # imports torch, which reads that environment

    return follow(*start_rank(config))


def follow(engine, hear: Callable[[], bytes]) -> int:
    """Execute what is heard, in order."""
    from services.gpu_worker.parallel.messages import ForgetSlots, SlotNews, decoder
    from services.gpu_worker.slots import column

    while True:
        try:
            data = hear()
        except RuntimeError as error:
            log.info("rank 0 is gone", detail=str(error).splitlines()[0])
            return 0
        match decoder.decode(data):
            case SlotNews() as news:
                slots, who = engine.slots, column(news.slots)
                slots.last_token[who] = column(news.last_tokens)
                slots.remaining[who] = column(news.remaining)
                slots.ended[who] = np.frombuffer(news.ended, dtype=np.bool_)
            case ForgetSlots():
                engine.reset()
            case command:
                engine.follow(command)


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the group's threads may still wait for ranks that are gone
