"""Many runs of one program: what they share is computed once, and one failure is one item's.

Leaves single runs to execution.
"""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

from radixfleet.backend.base import Backend
from radixfleet.backend.errors import BackendError
from radixfleet.lang import compiled
from radixfleet.lang.defaults import global_config
from radixfleet.lang.errors import BatchError
from radixfleet.lang.execution import Execution, Settings, split_arguments
from radixfleet.lang.graph import Graph
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
        try:
            split_arguments(program, (), arguments)
        except TypeError as error:
            raise TypeError(f"item {index}: {error}") from None
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
    lazy: bool,
) -> Iterator[ProgramState]:
    """States in the order of the items; after the last one BatchError, if some failed and `keep` is not set.

    `lazy`: items far ahead of the one that is read next do not start yet.
    """
    if not items:
        return
    threads = max(_LEAST_THREADS, _THREADS_PER_CPU * (os.cpu_count() or 1)) if num_threads == "auto" else num_threads
    window = _AHEAD + threads if lazy else len(items)
    states: list[ProgramState] = []
    failures: dict[int, BaseException] = {}
    progress = _Progress(len(items), progress_bar)
    with _Pin(settings.backend) as pin:
        order = _prepare(program, settings, items, window, pin)
        for state, failure in _finished(program, settings, items, order, threads, window):
            if failure is not None:
                failures[len(states)] = failure
            states.append(state)
            progress.step()
            yield state
    if failures and not keep:
        raise BatchError(states, failures)


class _Pin:
    """What all items of a batch start with stays cached until the batch has ended, however it ends."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._name = f"batch-{uuid.uuid4().hex}"
        self._made = False

    def compute(self, graph: Graph) -> None:
        """Raises BackendError."""
        self._made = compiled.compute_prefix(graph, self._backend, self._name)

    def __enter__(self) -> _Pin:
        return self

    def __exit__(self, *error: object) -> None:
        if self._made:
            with contextlib.suppress(BackendError):  # a server that is gone holds nothing
                self._backend.unpin(self._name)


def _prepare(program: Program, settings: Settings, items: list[dict[str, Any]], window: int, pin: _Pin) -> list[int]:
    """Compute what all items start with; returns the order in which items start."""
    order = list(range(len(items)))
    options = settings.options
    if len(items) < 2 or not (options.prefix or options.order):
        return order
    shared = {name: value for name, value in items[0].items() if all(_same(item.get(name), value) for item in items)}
    later = tuple(dict.fromkeys(name for item in items for name in item if name not in shared))
    graph = compiled.graph_of(program, shared, settings.sampling, more=later)
    if options.prefix and global_config.enable_precache_with_tracing:
        try:
            pin.compute(graph)
        except BackendError:
            return order  # the items will meet the same, and tell
    if options.order:
        return [
            i for first in range(0, len(items), window) for i in _sorted(graph, items, order[first : first + window])
        ]
    return order


def _sorted(graph: Graph, items: list[dict[str, Any]], indices: list[int]) -> list[int]:
    """Indices by what their items put into the text first: the order of the tree of their prefixes."""
    return sorted(indices, key=lambda index: [str(items[index].get(name, "")) for name in graph.arguments])


def _same(one: Any, other: Any) -> bool:
    """Only plain values are compared; others may not even know how."""
    return one is other or (isinstance(one, str | int | float) and type(one) is type(other) and one == other)


def _finished(
    program: Program, settings: Settings, items: list[dict[str, Any]], order: list[int], threads: int, window: int
) -> Iterator[tuple[ProgramState, BaseException | None]]:
    shared = SharedWork()
    running: dict[int, tuple[Execution, Future[BaseException | None]]] = {}
    started = 0
    pool = ThreadPoolExecutor(max(1, min(threads, len(items))), "radixfleet-batch")
    try:
        for wanted in range(len(items)):
            while started < min(wanted + window, len(items)) or wanted not in running:
                index = order[started]
                execution = Execution(program, settings, (), items[index], shared)
                running[index] = execution, pool.submit(execution.run_kept)
                started += 1
            execution, future = running[wanted]
            failure = future.result()
            del running[wanted]
            yield execution.state, failure
    finally:
        for execution, future in running.values():
            if not future.cancel():
                execution.cancel(wait=False)  # all are told before any is waited for
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
