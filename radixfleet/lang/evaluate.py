"""What each expression does to a state: text is appended, variables are set, turns and scopes begin and end.

Runs on the executor's thread. Leaves the model to work, queues and waiting to executor, HTTP calls to calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from radixfleet.lang import calls, reasoning, roles
from radixfleet.lang.errors import LanguageError
from radixfleet.lang.ir import (
    ApiCall,
    Assign,
    Expr,
    Gen,
    Known,
    Reasoning,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    items_of,
    values_in,
)
from radixfleet.lang.optimizations import WORTH_A_REQUEST
from radixfleet.lang.values import append_known, append_text, append_value, in_thread, resolved, settle
from radixfleet.lang.work import do_work

if TYPE_CHECKING:
    from radixfleet.lang.executor import Executor


def evaluate(state: Executor, items: Sequence[Any]) -> None:
    """Evaluate in order; texts and expressions as `items_of` gives them."""
    outer = state.following
    for index, item in enumerate(items):
        if state.run.cancelled:
            raise LanguageError("the program was cancelled")
        state.following = [*items[index + 1 :], *outer]
        if isinstance(item, str):
            append_text(state, item)
        elif isinstance(item, ApiCall):
            _api_call(state, item, more=any(isinstance(later, Gen | Select) for later in state.following))
        elif isinstance(item, Gen | Select):
            do_work(state, item)
        else:
            _HANDLERS[type(item)](state, item)
    state.following = outer


def _api_call(state: Executor, call: ApiCall, more: bool) -> None:
    if append_known(state, call):
        return
    pending = state.calls.get(call.number)
    if pending is None:
        settle(state, values_in(call))
        pending = Future()
        in_thread(state, pending, lambda: calls.perform(call, lambda value: resolved(state, value)))
    if more and not pending.done() and state.run.options.tail and state.transcript.unsent >= WORTH_A_REQUEST:
        state.run.prefill(state.transcript.prompt())
    text = pending.result()
    if call.max_tokens is not None:
        text = state.run.backend.clip(text, call.max_tokens)
    append_value(state, call, text)


def _role_begin(state: Executor, begin: RoleBegin) -> None:
    if state.transcript.open_role is not None:
        raise LanguageError(f"a turn of {begin.role} begins inside the turn of {state.transcript.open_role}")
    text = roles.begin_text(state.run.backend, state.transcript.roles, begin.role, spoken=begin.spoken)
    state.transcript.begin_turn(begin.role, text)
    state.say(text)


def _role_end(state: Executor, end: RoleEnd) -> None:
    if state.transcript.open_role != end.role:
        raise LanguageError(f"the turn of {end.role} ends, but it did not begin")
    text = roles.end_text(state.run.backend, state.transcript.roles)
    state.transcript.end_turn(text)
    state.say(text)


def _scope_begin(state: Executor, scope: ScopeBegin) -> None:
    assert scope.name is not None
    state.scopes.append((scope.name, state.transcript.position))


def _scope_end(state: Executor, scope: ScopeEnd) -> None:
    name, since = state.scopes.pop()
    assert name == scope.name
    state.set(name, state.transcript.text(since))


def _assign(state: Executor, assign: Assign) -> None:
    value = assign.value
    state.set(assign.name, resolved(state, value) if isinstance(value, str | Expr) else value)


def _reasoning(state: Executor, expression: Reasoning) -> None:
    tags = reasoning.tags_of(expression.model_type)
    items = items_of(expression.body)
    evaluate(state, items)
    for item in items:
        if isinstance(item, Gen) and item.name is not None:
            found = state.variables[item.name]
            thoughts, answer = reasoning.split(str(found.value), tags)
            state.set(item.name, answer, found.meta)
            state.set(f"{item.name}_reasoning_content", thoughts)


def _mention(state: Executor, known: Known) -> None:
    raise LanguageError(f"{known!r} belongs to a traced program and has no value here")


_HANDLERS: dict[type, Callable[[Any, Any], None]] = {
    RoleBegin: _role_begin,
    RoleEnd: _role_end,
    ScopeBegin: _scope_begin,
    ScopeEnd: _scope_end,
    Assign: _assign,
    Reasoning: _reasoning,
    Known: _mention,
}
