"""Many runs of one program: what they share is computed once, and one failure is one item's.

Leaves single runs to execution.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

from radixfleet.lang.errors import BatchError
from radixfleet.lang.execution import Execution, Settings, split_arguments
from radixfleet.lang.shared_work import SharedWork
from radixfleet.lang.state import ProgramState

if TYPE_CHECKING:
    from radixfleet.lang.program import Program

_LEAST_THREADS = 96
_THREADS_PER_CPU = 16
_AHEAD = 200  # items started beyond the one that is read next
_BAR = 30


def arguments_of(program: Program, items: Sequence[Mapping[str, Any] | Sequence[Any]]) -> list[dict[str, Any]]:
    """Every item as keyword arguments, checked before anything runs. Raises TypeError."""
    found = []
    for index, item in enumerate(items):
        if isinstance(item, Mapping):
            arguments = dict(item)
        elif isinstance(item, list | tuple):
            if len(item) > len(program.arg_names):
                raise TypeError(f"item {index} has {len(item)} values for {len(program.arg_names)} parameters")
            arguments = dict(zip(program.arg_names, item, strict=False))
        else:
            raise TypeError(f"item {index} is neither a mapping of arguments nor a tuple of them: {item!r}")
        split_arguments(program, (), arguments)
        found.append(arguments)
    return found


def run(
    program: Program,
    settings: Settings,
    items: list[dict[str, Any]],
    num_threads: int | Literal["auto"],
    *,
    progress_bar: bool,
    keep: bool,
) -> Iterator[ProgramState]:
    """States in the order of the items; after the last one BatchError, if some failed and `keep` is not set."""
    if not items:
        return
    threads = max(_LEAST_THREADS, _THREADS_PER_CPU * (os.cpu_count() or 1)) if num_threads == "auto" else num_threads
    states: list[ProgramState] = []
    failures: dict[int, BaseException] = {}
    progress = _Progress(len(items), progress_bar)
    for state, failure in _finished(program, settings, items, threads):
        if failure is not None:
            failures[len(states)] = failure
        states.append(state)
        progress.step()
        yield state
    if failures and not keep:
        raise BatchError(states, failures)


def _finished(
    program: Program, settings: Settings, items: list[dict[str, Any]], threads: int
) -> Iterator[tuple[ProgramState, BaseException | None]]:
    shared = SharedWork()
    running: deque[tuple[Execution, Future[BaseException | None]]] = deque()
    left = iter(items)
    pool = ThreadPoolExecutor(max(1, min(threads, len(items))), "radixfleet-batch")
    try:
        while True:
            while len(running) < _AHEAD + threads and (item := next(left, None)) is not None:
                execution = Execution(program, settings, (), item, shared)
                running.append((execution, pool.submit(execution.run_kept)))
            if not running:
                return
            execution, future = running.popleft()
            failure = future.result()
            yield execution.state, failure
    finally:
        for execution, future in running:
            if not future.cancel():
                execution.cancel()
        pool.shutdown(wait=True, cancel_futures=True)


class _Progress:
    """A line on stderr that counts."""

    def __init__(self, total: int, shown: bool) -> None:
        self._total = total
        self._shown = shown
        self._done = 0

    def step(self) -> None:
        self._done += 1
        if not self._shown:
            return
        filled = _BAR * self._done // self._total
        end = "\n" if self._done == self._total else ""
        sys.stderr.write(f"\r[{'#' * filled}{' ' * (_BAR - filled)}] {self._done}/{self._total}{end}")
        sys.stderr.flush()
