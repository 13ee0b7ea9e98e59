"""Rank 0's engine: it executes each step together with the other ranks. Leaves the step itself to the engine.

rank 0   command |> forward ........ masks, sampling |> news        answer to the scheduler
rank r            > forward ........                  > its slots are as rank 0's again
"""

from __future__ import annotations

import numpy as np
import structlog

from services.gpu_worker.engine import Engine, MaskSource, StepStats
from services.gpu_worker.faults import StepAborted
from services.gpu_worker.kv_cache import KVCache
from services.gpu_worker.parallel.group import GroupBroken, TensorGroup
from services.gpu_worker.parallel.messages import ForgetSlots, SlotNews, encode
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
        try:
            self._group.broadcast(encode(ForgetSlots()))
        except RuntimeError as error:
            log.error("a rank is gone", detail=str(error))  # the next step will fail, which says it to the scheduler

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
