"""Rank 0's engine: it executes each step together with the other ranks. Leaves the step itself to the engine.

In one piece (steps in two halves: `cuda.following`):

rank 0   command |> forward ........ masks, sampling |> news        answer to the scheduler
rank r            > forward ........                  > its slots are as rank 0's again
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import structlog
import torch
from numpy.typing import NDArray

from services.gpu_worker.cuda.device import GraphDevice
from services.gpu_worker.cuda.engine import PipelinedEngine
from services.gpu_worker.cuda.launched import Launched
from services.gpu_worker.engine import Engine, MaskSource, StepStats
from services.gpu_worker.faults import ProtocolError, StepAborted
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.parallel.group import GroupBroken, TensorGroup
from services.gpu_worker.parallel.messages import ForgetSlots, LaunchStep, SettleStep, SlotNews, encode
from services.gpu_worker.slots import Slots, column
from shared.messages.step import StepCommand, StepResult

log = structlog.get_logger(__name__)


class LeadingEngine:
    """An engine as the executor knows it. After GroupBroken it is good for nothing more."""

    def __init__(self, engine: Engine, group: TensorGroup) -> None:
        self._engine = engine
        self._group = group

    @property
    def stats(self) -> StepStats:
        return self._engine.stats

    @property
    def kv_cache(self) -> KVCache:
        return self._engine.kv_cache

    def reset(self) -> None:
        """Forget all requests, on every rank."""
        self._engine.reset()
        _forget(self._group)

    def execute(self, command: StepCommand, masks: MaskSource, incarnation: int, queue_ms: float = 0.0) -> StepResult:
        """As Engine.execute. Raises GroupBroken for whatever went wrong: the other ranks may hang in that step."""
        try:
            self._group.broadcast(encode(command))
            result = self._engine.execute(command, masks, incarnation, queue_ms)
            self._group.broadcast(encode(news(command, self._engine.slots)))
        except StepAborted:
            raise  # every rank has done its forward; what follows is a reset
        except Exception as error:
            raise GroupBroken(f"{type(error).__name__}: {error}") from error
        return result


class LeadingPipeline:
    """A pipelined engine as the executor knows it. After GroupBroken it is good for nothing more."""

    def __init__(self, engine: Engine, device: GraphDevice, group: TensorGroup) -> None:
        self._engine = PipelinedEngine(engine, device, ranks=Words(group))
        self._group = group

    @property
    def stats(self) -> StepStats:
        return self._engine.stats

    @property
    def kv_cache(self) -> KVCache:
        return self._engine.kv_cache

    def reset(self) -> None:
        """Forget all requests and what is under way, on every rank."""
        self._engine.reset()
        _forget(self._group)

    def must_complete_before(self, command: StepCommand) -> bool:
        """As PipelinedEngine."""
        return self._engine.must_complete_before(command)

    def launch(self, command: StepCommand) -> Launched:
        """As PipelinedEngine. Raises GroupBroken for what the model raises: the other ranks may hang in that step."""
        with _in_step():
            return self._engine.launch(command)

    def complete(self, step: Launched, masks: MaskSource, incarnation: int, queue_ms: float = 0.0) -> StepResult:
        """As PipelinedEngine. Raises GroupBroken for whatever went wrong on a device."""
        with _in_step():
            return self._engine.complete(step, masks, incarnation, queue_ms)

    def execute(self, command: StepCommand, masks: MaskSource, incarnation: int, queue_ms: float = 0.0) -> StepResult:
        """Both halves at once."""
        return self.complete(self.launch(command), masks, incarnation, queue_ms)


def lead(engine: Engine, group: TensorGroup, device: GraphDevice | None) -> LeadingEngine | LeadingPipeline:
    """Rank 0's engine: with a device it is driven in two halves, and so must the other ranks' be."""
    if device is None:
        return LeadingEngine(engine, group)
    log.info("steps are launched ahead of results", device=str(device.device), ranks=group.size)
    return LeadingPipeline(engine, device, group)


class Words:
    """The `Ranks` of a pipelined engine: commands by words, tokens from device to device."""

    def __init__(self, group: TensorGroup) -> None:
        self._group = group

    def launch(self, command: StepCommand, *, deferred: bool) -> None:
        """As Ranks."""
        self._group.broadcast(encode(LaunchStep(command, deferred)))

    def share(self, tokens: torch.Tensor) -> None:
        """As Ranks."""
        self._group.share(tokens)

    def settle(self, tokens: NDArray[np.int64]) -> None:
        """As Ranks."""
        self._group.broadcast(encode(SettleStep(_pack(tokens))))

    def settle_deferred(self, command: StepCommand, slots: Slots) -> None:
        """As Ranks."""
        self._group.broadcast(encode(news(command, slots)))


@contextmanager
def _in_step() -> Iterator[None]:
    try:
        yield
    except (StepAborted, ProtocolError):
        raise  # the other ranks have not begun the step, or have done its forward; what follows is a reset
    except Exception as error:
        raise GroupBroken(f"{type(error).__name__}: {error}") from error


def _forget(group: TensorGroup) -> None:
    try:
        group.broadcast(encode(ForgetSlots()))
    except RuntimeError as error:
        log.error("a rank is gone", detail=str(error))  # the next step will fail, which says it to the scheduler


def news(command: StepCommand, slots: Slots) -> SlotNews:
    """The state of every slot that had a row in this step."""
    touched = np.concatenate([column(command.decode_slots), [row.slot for row in command.prefills]]).astype(np.int64)
    return SlotNews(
        slots=_pack(touched),
        last_tokens=_pack(slots.last_token[touched]),
        remaining=_pack(slots.remaining[touched]),
        ended=slots.ended[touched].tobytes(),
    )


def _pack(values: np.ndarray) -> bytes:
    return values.astype("<i4").tobytes()
