"""A group of forks: states that share everything up to the fork, and their way back into the parent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from radixfleet.lang.errors import LanguageError
from radixfleet.lang.executor import Executor
from radixfleet.lang.optimizations import WORTH_A_REQUEST

if TYPE_CHECKING:
    from radixfleet.lang.state import ProgramState

MODES = ("gather_variable", "concate_and_append")


class ForkGroup:
    """Index it, iterate it, or append to all at once; join() brings the results back."""

    def __init__(self, states: list[ProgramState], parent: Executor) -> None:
        self._states = states
        self._parent = parent
        self._from = parent.transcript.place
        self._known = set(parent.variables)

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, index: int) -> ProgramState:
        return self._states[index]

    def __setitem__(self, index: int, state: ProgramState) -> None:
        """For `forks[i] += ...`, which appends and stores the same state again."""
        if state is not self._states[index]:
            raise TypeError("a fork cannot be replaced by another state")

    def __iter__(self) -> Iterator[ProgramState]:
        return iter(self._states)

    def __iadd__(self, other: Any) -> ForkGroup:
        """The same expression for all, one of a list for each, or what a function of the index gives."""
        if callable(other):
            given = [other(index) for index in range(len(self._states))]
        elif isinstance(other, list | tuple):
            if len(other) != len(self._states):
                raise ValueError(f"{len(other)} expressions for {len(self._states)} forks")
            given = list(other)
        else:
            given = [other] * len(self._states)
        for state, expression in zip(self._states, given, strict=True):
            state += expression
        return self

    def join(self, mode: str = "gather_variable") -> None:
        """Wait for all forks. `gather_variable`: the parent gets each new variable as a list.

        `concate_and_append`: the parent gets the forks' texts, one after another. Raises a fork's error.
        """
        if mode not in MODES:
            raise ValueError(f"unknown join mode {mode!r}; there are {', '.join(MODES)}")
        executors = [state.over(lambda executor: executor) for state in self._states]
        for executor in executors:
            executor.settle()
        if mode == "concate_and_append":
            self._append(executors)
        else:
            self._gather(executors)

    def _gather(self, executors: list[Executor]) -> None:
        names = dict.fromkeys(name for one in executors for name in one.variables if name not in self._known)
        for name in names:
            found = [one.variables[name].value if name in one.variables else None for one in executors]
            meta = [one.variables[name].meta if name in one.variables else {} for one in executors]
            self._parent.set(name, found, {"forks": meta})

    def _append(self, executors: list[Executor]) -> None:
        self._parent.settle()
        if any(one.transcript.left_turn(self._from) for one in [self._parent, *executors]):
            raise LanguageError("texts of forks can be joined only where all stand in the turn in which they began")
        for executor in executors:
            self._parent.transcript.append_turns(executor.transcript, self._from)
            self._parent.say(executor.transcript.text(self._from.position))


def check_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"a fork needs at least one state, not {size}")


def warm_prefix(executor: Executor) -> None:
    """Compute what all forks share before they start, so that none of them computes it again."""
    if executor.run.options.prefix and executor.transcript.unsent >= WORTH_A_REQUEST:
        executor.run.prefill(executor.transcript.prompt())
