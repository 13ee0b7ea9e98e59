"""A source of guesses for tests that knows the answers: so many are right, then one is wrong, as a seed says."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

from services.scheduler.request import Request
from services.scheduler.worker import Worker
from shared import ints
from tests.fake_model import VOCAB, generate
from tests.local_fleet import LocalFleet

WRONG = 0.15
"""Share of its guesses."""


class Oracle:
    """In place of a Foresight; never sure of more than `most` guesses."""

    guesses = True
    asked = 0

    def __init__(self, request: Request, seed: int, most: int) -> None:
        prompt = ints.unpack(request.message.prompt_ids).tolist()
        self._answer = generate(prompt, request.max_tokens)
        self._told = len(request.output)
        self._draw, self._seed = random.Random(seed), seed
        self._most = most

    @property
    def num_tokens(self) -> int:
        return self._told

    def learn(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            assert token == self._answer[self._told], "it learns something else than what was sampled"
            self._told += 1

    def worth(self, most: int, price: float, behind: int = 0) -> tuple[int, float]:
        count = min(most, self._draw.randint(0, self._most))
        return count, float(count)

    def guess(self, count: int) -> bytes:
        right = self._answer[self._told : self._told + count]
        right += [0] * (count - len(right))
        return ints.pack((t + self._is_wrong(self._told + i)) % VOCAB for i, t in enumerate(right))

    def _is_wrong(self, position: int) -> bool:
        """The same whenever it is asked."""
        return random.Random(self._seed + position).random() < WRONG


def let_guess(fleet: LocalFleet, most: int = 7, seed: int = 0) -> None:
    """Every request that may guess does, with an oracle of its own."""
    drafting: Any = fleet.core.drafting
    prepare = drafting.prepare
    draw = random.Random(seed)

    def with_oracle(worker: Worker, request: Request) -> None:
        fresh = request.foresight is None
        prepare(worker, request)
        if fresh and request.foresight is not None:
            request.foresight = Oracle(request, draw.getrandbits(32), most)  # type: ignore[assignment]

    drafting.prepare = with_oracle
