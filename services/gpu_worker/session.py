"""One incarnation's part of the step protocol: epoch, dense step ids, masks beside the FIFO, its end.

Written from the event loop; the compute thread only asks `is_live` and waits in `take_masks`. Leaves sockets to the
worker and execution to the engine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import structlog

from services.gpu_worker.faults import ProtocolError, StepAborted
from shared import ints
from shared.messages.step import StepCommand, TokenMasks

log = structlog.get_logger(__name__)


class Session:
    """From one welcome to the next reset, fault, or loss of the scheduler."""

    def __init__(self, incarnation: int, epoch: int, max_inflight_steps: int) -> None:
        self.incarnation = incarnation
        self.epoch = epoch
        self._ahead = max_inflight_steps
        self._next_step = 0
        self._sizes: deque[tuple[int, int, int]] = deque(maxlen=max_inflight_steps + 1)  # (step, tokens, rows)
        self._live = True
        self._changed = threading.Condition()
        self._masks: dict[int, tuple[bytes, bytes]] = {}
        self._settled = -1  # every step up to this one needs no masks any more

    @property
    def is_live(self) -> bool:
        """False once nothing of this session may be executed or answered."""
        return self._live

    def end(self) -> None:
        """Give up what is queued and what waits for masks."""
        with self._changed:
            self._live = False
            self._changed.notify_all()

    def admit(self, command: StepCommand) -> None:
        """Raises ProtocolError unless `command` is exactly the next step of this epoch."""
        if command.epoch != self.epoch:
            raise ProtocolError(f"step {command.step_id} of epoch {command.epoch}, this is epoch {self.epoch}")
        if command.step_id != self._next_step:
            raise ProtocolError(f"step {command.step_id} came where step {self._next_step} was due")
        self._next_step += 1
        decodes = ints.count(command.decode_slots)
        known = sum(ints.count(row.token_ids) for row in command.prefills)
        self._sizes.append((command.step_id, decodes + known, decodes + len(command.prefills)))

    def size_of(self, step_id: int) -> tuple[int, int]:
        """Tokens and rows of one of the last steps that were admitted."""
        return next(((tokens, rows) for step, tokens, rows in self._sizes if step == step_id), (1, 1))

    def put_masks(self, masks: TokenMasks, data: bytes) -> None:
        """Keep masks until their step asks for them. Raises ProtocolError for masks no step can be owed yet."""
        step = masks.step_id
        if masks.epoch != self.epoch or step > self._next_step + self._ahead:
            raise ProtocolError(f"masks of step {step}, epoch {masks.epoch}: the next step is {self._next_step}")
        with self._changed:
            if step <= self._settled or step in self._masks:
                log.warning("masks that no step is owed", step_id=step)
                return
            self._masks[step] = (masks.slots, data)
            self._changed.notify_all()

    def take_masks(self, step_id: int, on_wait: Callable[[], None] = lambda: None) -> tuple[bytes, bytes]:
        """Wait for the masks of a step; `on_wait` is called when they are not there yet. Raises StepAborted."""
        with self._changed:
            if step_id not in self._masks and self._live:
                on_wait()
            self._changed.wait_for(lambda: step_id in self._masks or not self._live)
            if not self._live:
                raise StepAborted
            return self._masks.pop(step_id)

    def settle(self, step_id: int) -> None:
        """The step was executed: masks for it would be one too many."""
        with self._changed:
            self._settled = step_id
            owed_none = self._masks.pop(step_id, None)
        if owed_none is not None:
            log.warning("masks that no step is owed", step_id=step_id)
