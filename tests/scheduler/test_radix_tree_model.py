"""Random lives of requests on several workers: tree and pools against a naive model, after every single step.

For a longer hunt set RADIX_EXAMPLES and RADIX_STEPS (drawn by hypothesis, which shrinks what fails) and RADIX_SEEDS
(plain dice, many more steps in the same time).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import HealthCheck, settings

from tests.scheduler.radix_life import ALPHABET, GREEDY, NAMESPACES, TreeLife
from tests.scheduler.radix_model import Tokens

TreeLife.TestCase.settings = settings(
    max_examples=int(os.environ.get("RADIX_EXAMPLES", "250")),
    stateful_step_count=int(os.environ.get("RADIX_STEPS", "60")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestTreeLife = pytest.mark.timeout(3600)(TreeLife.TestCase)


class Dice:
    """Random arguments for the rules: much cheaper than drawn ones, but a failure does not shrink."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def number(self) -> int:
        return self.rng.randrange(1 << 16)

    def cut(self) -> int:
        return self.rng.randrange(4) if self.rng.random() < 0.6 else self.number()

    def text(self, longest: int = 12) -> Tokens:
        length = self.rng.choice((0, self.rng.randint(0, 3), self.rng.randint(0, longest)))
        return tuple(self.rng.choice(ALPHABET) for _ in range(length))

    def output(self) -> Tokens:
        return tuple(self.rng.choice((*ALPHABET, GREEDY, GREEDY)) for _ in range(self.rng.randint(0, 4)))

    def turns(self) -> list[bool]:
        return [self.rng.random() < 0.5 for _ in range(self.rng.randint(0, 6))]

    def step(self, life: TreeLife) -> None:
        """One rule, the busier ones more often."""
        number, cut, text, rng = self.number, self.cut, self.text, self.rng
        admit = partial(life.admit, number(), cut(), text(), rng.choice((b"", b"", NAMESPACES[1])), number())
        anytime: list[tuple[int, Callable[[], None]]] = [
            (4, admit),
            (3, partial(life.serve, number(), cut(), text(), number(), self.output())),
            (1, partial(life.match, number(), cut(), text(), rng.choice(NAMESPACES))),
            (3, partial(life.touch, number(), cut(), number())),
            (1, partial(life.match_early, number(), cut(), text())),
            (3, partial(life.evict, number(), rng.randrange(7))),
            (1, partial(life.lose_worker, number(), rng.randrange(10))),
        ]
        if rng.random() < 0.1:
            anytime.append((1, partial(life.clear, number())))
        if life.stale:
            anytime.append((2, partial(life.admit_late, number())))
        if life.requests:
            anytime += [
                (4, partial(life.fork, number(), text(3), rng.random() < 0.7, self.turns())),
                (4, partial(life.write, number(), self.output())),
                (8, partial(life.decode, number(), [self.output() for _ in range(rng.randint(1, 4))])),
                (4, partial(life.publish, number(), rng.choice((0, 0, 0, 1, 2, 5)))),
                (3, partial(life.finish, number(), rng.random() < 0.7)),
                (1, partial(life.forget_copy, number())),
            ]
        rng.choices([action for _, action in anytime], [weight for weight, _ in anytime])[0]()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(int(os.environ.get("RADIX_SEEDS", "40"))))
def test_a_long_random_life(seed: int) -> None:
    """The same rules and checks, hundreds of steps in a row."""
    dice = Dice(seed)
    life = TreeLife()
    life.begin(1 + seed % 6, 2 + seed % 2, dice.rng.randint(6, 40))
    for _ in range(150):
        dice.step(life)
        life.tree_is_sound()
        life.every_page_is_somebodys()
        life.contents_are_right()
    life.teardown()
