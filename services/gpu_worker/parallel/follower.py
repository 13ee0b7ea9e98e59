"""A rank beyond the first: does what rank 0 says until rank 0 is gone. Leaves sampling and the scheduler to rank 0.

Any failure ends the process, and with it the group: rank 0 notices at its next collective operation.
"""

from __future__ import annotations

import signal

import numpy as np
import structlog

from services.gpu_worker.cuda.device import GraphDevice
from services.gpu_worker.cuda.following import FollowingEngine
from services.gpu_worker.engine import Engine
from services.gpu_worker.memory import MemoryPlanError
from services.gpu_worker.models.config import ModelError
from services.gpu_worker.parallel.group import TensorGroup
from services.gpu_worker.parallel.messages import ForgetSlots, LaunchStep, SettleStep, SlotNews, decoder
from services.gpu_worker.slots import Slots, column
from services.gpu_worker.startup import build_engine
from shared import logging as service_logging
from shared import service
from shared.config import WorkerConfig

log = structlog.get_logger(__name__)


def run(config: WorkerConfig) -> int:
    """Join, load, follow; returns the exit code, 0 where rank 0 has ended."""
    service_logging.configure("worker", config.log_level, config.log_format)
    service.watch_parent()  # rank 0 may be gone while this rank waits for it on the device
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; rank 0 drains, then ends us
    try:
        built = build_engine(config)
    except (ModelError, MemoryPlanError) as error:
        log.error("cannot start", rank=config.tp_rank, reason=str(error))
        return 1
    assert built.group is not None
    follow(built.engine, built.group, built.device)
    return 0


def follow(engine: Engine, group: TensorGroup, device: GraphDevice | None = None) -> None:
    """Execute what rank 0 says, in order, until it is gone: with a device in two halves, as rank 0 then does."""
    ahead = None if device is None else FollowingEngine(engine, device, group)
    while True:
        try:
            data = group.broadcast()
        except RuntimeError as error:
            log.info("rank 0 is gone", detail=str(error).splitlines()[0])
            return
        obey(data, engine, ahead)


def obey(data: bytes, engine: Engine, ahead: FollowingEngine | None) -> None:
    """One word of rank 0."""
    match decoder.decode(data):
        case SlotNews() as news:
            take(news, engine.slots)
            if ahead is not None:
                ahead.settle_deferred()
        case ForgetSlots():
            (ahead or engine).reset()
        case LaunchStep() as step:
            assert ahead is not None
            ahead.launch(step.command, deferred=step.deferred)
        case SettleStep() as step:
            assert ahead is not None
            ahead.settle(column(step.tokens))
        case command:
            engine.follow(command)


def take(news: SlotNews, slots: Slots) -> None:
    """What rank 0 sampled, as far as later steps depend on it."""
    who = column(news.slots)
    slots.last_token[who] = column(news.last_tokens)
    slots.remaining[who] = column(news.remaining)
    slots.ended[who] = np.frombuffer(news.ended, dtype=np.bool_)
