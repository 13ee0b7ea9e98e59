"""Values of expressions: appended again where they are known, found out where they are needed early.

Leaves the model to work, the order of evaluation to evaluate and HTTP calls to calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from radixfleet.lang import calls
from radixfleet.lang.ir import ApiCall, Expr, expressions_in, items_of, values_in

if TYPE_CHECKING:
    from radixfleet.lang.executor import Executor

PendingCall = Future[str]


def append_text(state: Executor, text: str, name: str | None = None) -> None:
    state.transcript.append_text(text)
    state.say(text, name)
    if not state.run.options.merge and text:
        state.run.backend.prefill(state.transcript.prompt())


def append_value(state: Executor, item: Expr, text: str) -> None:
    """A value that no model wrote: append it and set its variable."""
    state.values[item.number] = text
    append_text(state, text, item.name)
    state.set(item.name, text)


def append_known(state: Executor, item: Expr) -> bool:
    """Append the value of an expression that has one: met before, or bound by run()."""
    name = item.name
    if item.number in state.values:
        append_text(state, state.values[item.number], name)
        if name is not None:
            state.set(name, state.variables[name].value, state.variables[name].meta)
        return True
    if name is not None and name in state.run.bindings:
        state.run.used_bindings.add(name)
        append_value(state, item, str(state.run.bindings[name]))
        return True
    return False


def resolved(state: Executor, value: Any) -> str:
    """Text with every mention of an expression replaced by its value."""
    items = items_of(value)
    settle(state, [item for item in items if isinstance(item, Expr)])
    return "".join(item if isinstance(item, str) else state.values[item.number] for item in items)


def filled(state: Executor, value: Any) -> Any:
    """What a program returned; where it is or mentions expressions that were evaluated, their text stands for them."""
    if type(value) in (dict, list, tuple) and next(expressions_in(value), None) is not None:
        if isinstance(value, dict):
            return {name: filled(state, inner) for name, inner in value.items()}
        return type(value)(filled(state, inner) for inner in value)
    if not isinstance(value, str | Expr):
        return value
    items = items_of(value)
    mentioned = [item.number for item in items if isinstance(item, Expr)]
    if not mentioned or any(number not in state.values for number in mentioned):
        return value
    return resolved(state, value)


def settle(state: Executor, items: Sequence[Expr]) -> None:
    """Evaluate expressions that are needed before their place in the text: each beside the text, at once."""
    missing = list({item.number: item for item in items if item.number not in state.values}.values())
    if not missing:
        return
    sides = [(item, state.aside()) for item in missing]
    work = [partial(_aside, side, item) for item, side in sides]
    for (item, side), _ in zip(sides, _run_all(state, work), strict=True):
        state.values[item.number] = side.values[item.number]
        if item.name is not None:
            found = side.variables[item.name]
            state.set(item.name, found.value, found.meta)


def _aside(side: Executor, item: Expr) -> str:
    try:
        side.evaluate([item])
    finally:
        side.drop_feed()
    return side.values[item.number]


def start_calls(state: Executor, items: Sequence[Any]) -> None:
    """Start calls of HTTP APIs whose values are all known, before it is their turn.

    Python functions wait for it: only their author knows whether they may run early.
    """
    if not state.run.options.concurrent:
        return
    for item in items:
        if not isinstance(item, ApiCall) or callable(item.target) or item.name in state.run.bindings:
            continue
        if all(value.number in state.values for value in values_in(item)):
            with state.run.changed:
                if item.number in state.calls or item.number in state.values:
                    continue
                pending: PendingCall = Future()
                state.calls[item.number] = pending
            in_thread(state, pending, partial(calls.perform, item, partial(resolved, state)))


def _run_all(state: Executor, work: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results in order; the first failure is raised after all have ended."""
    if not state.run.options.concurrent or len(work) < 2:
        return [one() for one in work]
    futures: list[Future[Any]] = [Future() for _ in work]
    threads = [in_thread(state, future, one) for future, one in zip(futures, work, strict=True)]
    for thread in threads:
        thread.join()
    return [future.result() for future in futures]


def in_thread(state: Executor, future: Future[Any], work: Callable[[], Any]) -> threading.Thread:
    def body() -> None:
        state.helpers.add(threading.get_ident())
        try:
            future.set_result(work())
        except BaseException as error:  # whoever asks for the result raises it
            future.set_exception(error)
        finally:
            state.helpers.discard(threading.get_ident())

    thread = threading.Thread(target=body, name="radixfleet-call", daemon=True)
    thread.start()
    return thread
