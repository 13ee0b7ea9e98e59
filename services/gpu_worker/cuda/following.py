"""A rank beyond the first in two halves: launches what rank 0 launches, settles what it settles, in the same order.

rank 0   launch t > | share tokens of t | launch t+1 > | ... | settle t >
rank r            > | .. in its stream .. |          > |     |        > its slots are as rank 0's again

So all ranks run the same rows, whatever was known when. Leaves sampling to rank 0 and hearing from it to the caller.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

from services.gpu_worker.cuda.device import GraphDevice
from services.gpu_worker.cuda.forwarding import Forwarding, account, settle
from services.gpu_worker.cuda.launched import Launched
from services.gpu_worker.engine import Engine
from services.gpu_worker.outcome import Outcome
from services.gpu_worker.parallel.group import TensorGroup
from shared.messages.step import StepCommand

Ints = NDArray[np.int64]


class FollowingEngine:
    """An engine's slots and model, driven by what rank 0 says. It waits for the device nowhere but for its inputs."""

    def __init__(self, engine: Engine, device: GraphDevice, group: TensorGroup) -> None:
        self._engine, self._group = engine, group
        self.slots = engine.slots
        self._forwarding = Forwarding(engine, device)
        self._flight: deque[Launched] = deque()

    def reset(self) -> None:
        """Forget all requests and what is under way."""
        self._flight.clear()
        self._engine.reset()

    @torch.inference_mode()
    def launch(self, command: StepCommand, *, deferred: bool) -> None:
        """Apply the command and enqueue its forward; the tokens come from rank 0 in the order of the stream."""
        layout = self._forwarding.lay_out(command)
        step, sent = self._forwarding.enqueue(layout, deferred=deferred)
        if not deferred and len(layout.who):
            tokens = torch.zeros_like(sent["who"])
            self._group.share(tokens)
            self._forwarding.state.keep(tokens, sent["who"])
        step.logits = None  # a part of them, which rank 0 has
        account(step, layout.who, self.slots)
        self._flight.append(step)

    def settle(self, tokens: Ints) -> None:
        """What the oldest step under way has drawn, of the rows that still count."""
        step = self._flight.popleft()
        settle(step, tokens, self.slots, self._flight, Outcome(step.rows.num_outputs))

    @torch.inference_mode()
    def settle_deferred(self) -> None:
        """The oldest step under way is sampled, and the slots have been told what of it concerns them."""
        step = self._flight.popleft()
        who = step.rows.slots[step.rows.sampling]
        sent = self._forwarding.staging.send({"who": who, "tokens": self.slots.last_token[who]})
        self._forwarding.state.keep(sent["tokens"], sent["who"])
