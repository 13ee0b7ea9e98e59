"""A fork of a traced program. Leaves what its states append to tracer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from radixfleet.lang.ir import Expr

if TYPE_CHECKING:
    from radixfleet.lang.tracer import TracedState


class TracedForks:
    """Looks like a ForkGroup."""

    def __init__(self, states: list[TracedState], parent: TracedState) -> None:
        self._states = states
        self._parent = parent

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, index: int) -> TracedState:
        return self._states[index]

    def __setitem__(self, index: int, state: TracedState) -> None:
        """For `forks[i] += ...`."""

    def __iter__(self) -> Iterator[TracedState]:
        return iter(self._states)

    def __iadd__(self, other: Any) -> TracedForks:
        for index, state in enumerate(self._states):
            if callable(other) and not isinstance(other, Expr):
                state += other(index)
            else:
                state += other[index] if isinstance(other, list | tuple) else other
        return self

    def join(self, mode: str = "gather_variable") -> None:
        self._parent.join(self._states, mode)
