"""What each expression does to a state: ask the backend, append the answer, set the variable.

Runs on the executor's thread. Leaves queues and waiting to executor, HTTP calls to calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from radixfleet.backend.base import Answer
from radixfleet.lang import calls, chain, reasoning, roles
from radixfleet.lang.choices import ChoicesDecision, mean, values
from radixfleet.lang.errors import LanguageError
from radixfleet.lang.feed import Feed
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

if TYPE_CHECKING:
    from radixfleet.lang.executor import Executor

PendingCall = Future[str]


def evaluate(state: Executor, items: Sequence[Any]) -> None:
    """Evaluate in order; texts and expressions as `items_of` gives them."""
    outer = state.following
    for index, item in enumerate(items):
        if state.run.cancelled:
            raise LanguageError("the program was cancelled")
        state.following = [*items[index + 1 :], *outer]
        if isinstance(item, str):
            _text(state, item)
        elif isinstance(item, ApiCall):
            _api_call(state, item, more=any(isinstance(later, Gen | Select) for later in state.following))
        elif isinstance(item, Gen | Select):
            _work(state, item)
        else:
            _HANDLERS[type(item)](state, item)
    state.following = outer


def _work(state: Executor, item: Gen | Select) -> None:
    """What the model has to do, in a request of its own or as a step of a script."""
    if _known(state, item):
        return
    answer = _fed(state, item)
    if isinstance(item, Gen):
        _gen(state, item, answer)
    else:
        _select(state, item, answer)
    start_calls(state, state.ahead(wait=False))


def _fed(state: Executor, item: Gen | Select) -> Answer | None:
    """The answer from a script; None where this expression needs a request of its own."""
    options = state.run.options
    if state.feed is None or item not in state.feed:
        state.drop_feed()
        if not (options.script and options.merge and state.run.backend.has_scripts):
            return None
        found, is_open = chain.find(state, [item, *state.ahead(wait=False)])
        if is_open and not state.run.inline:
            found, _ = chain.find(state, [item, *state.ahead()])
        if not found.worth:
            return None
        state.feed = Feed(state, found)
    answer = state.feed.take(lambda text: state.say(text, item.name))
    if state.feed.done:
        state.drop_feed()
    return answer


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
            _in_thread(state, pending, partial(calls.perform, item, partial(_resolved, state)))


def _text(state: Executor, text: str, name: str | None = None) -> None:
    state.transcript.append_text(text)
    state.say(text, name)
    if not state.run.options.merge and text:
        state.run.backend.prefill(state.transcript.prompt())


def _gen(state: Executor, gen: Gen, answer: Answer | None) -> None:
    sampling = gen.sampling.over(state.run.sampling)
    prompt = state.transcript.prompt()
    if answer is not None:
        state.say("", gen.name, answer.meta)
    elif state.run.stream and sampling.n in (None, 1):
        answer = Answer("")
        shown = 0
        for answer in state.run.stream_answers(prompt, sampling):
            state.say(answer.text[shown:], gen.name, answer.meta)
            shown = len(answer.text)
    else:
        answer = state.run.generate(prompt, sampling)
        state.say(answer.text, gen.name, answer.meta)
    state.transcript.append_answer(answer, answer.text)
    state.values[gen.number] = answer.text
    every = [answer, *answer.others]
    if len(every) > 1:
        state.set(gen.name, [one.text for one in every], {"choices": [one.meta for one in every]})
    else:
        state.set(gen.name, answer.text, answer.meta)


def _select(state: Executor, select: Select, answer: Answer | None) -> None:
    if answer is not None:
        decision = ChoicesDecision(answer.text, answer.meta)
    else:
        options = [_resolved(state, option) for option in select.options]
        decision, answer = _decide(state, select, list(dict.fromkeys(options)))
        state.say(decision.decision, select.name, decision.meta_info)
    state.transcript.append_answer(answer, decision.decision)
    state.values[select.number] = decision.decision
    state.set(select.name, decision.decision, decision.meta_info)


def _decide(state: Executor, select: Select, options: list[str]) -> tuple[ChoicesDecision, Answer]:
    run, prompt = state.run, state.transcript.prompt()
    picked = run.backend.pick(prompt, options)
    if picked is not None:
        return ChoicesDecision(options[picked]), Answer(options[picked])

    def score() -> tuple[ChoicesDecision, Answer]:
        scores = run.backend.score(prompt, options, batched=run.options.select)
        alone = run.backend.score_alone(scores) if select.method.requires_unconditional_logprobs else None
        rows = [list(one.rows) for one in scores]
        means = [mean(values(one)) for one in rows]
        decision = select.method(
            choices=options,
            normalized_prompt_logprobs=means,
            input_token_logprobs=rows,
            output_token_logprobs=[[] for _ in rows],
            unconditional_token_logprobs=alone,
        )
        meta = {"normalized_prompt_logprobs": means, "input_token_logprobs": rows, **decision.meta_info}
        won = scores[options.index(decision.decision)]
        answer = Answer(decision.decision, won.meta, won.prompt_ids)
        return ChoicesDecision(decision.decision, meta), answer

    return run.share(prompt, ("select", tuple(options), select.method), score)


def _api_call(state: Executor, call: ApiCall, more: bool) -> None:
    if _known(state, call):
        return
    pending = state.calls.get(call.number)
    if pending is None:
        _settle_values(state, values_in(call))
        pending = Future()
        _in_thread(state, pending, lambda: calls.perform(call, lambda value: _resolved(state, value)))
    if more and not pending.done() and state.run.options.tail and state.transcript.unsent >= WORTH_A_REQUEST:
        state.run.prefill(state.transcript.prompt())
    text = pending.result()
    if call.max_tokens is not None:
        text = state.run.backend.clip(text, call.max_tokens)
    _value(state, call, text)


def _value(state: Executor, item: Expr, text: str) -> None:
    """A value that no model wrote: append it and set its variable."""
    state.values[item.number] = text
    _text(state, text, item.name)
    state.set(item.name, text)


def _known(state: Executor, item: Expr) -> bool:
    """Append the value of an expression that has one: met before, or bound by run()."""
    name = item.name
    if item.number in state.values:
        _text(state, state.values[item.number], name)
        if name is not None:
            state.set(name, state.variables[name].value, state.variables[name].meta)
        return True
    if name is not None and name in state.run.bindings:
        state.run.used_bindings.add(name)
        _value(state, item, str(state.run.bindings[name]))
        return True
    return False


def _settle_values(state: Executor, items: Sequence[Expr]) -> None:
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
    evaluate(side, [item])
    return side.values[item.number]


def _resolved(state: Executor, value: Any) -> str:
    """Text with every mention of an expression replaced by its value."""
    items = items_of(value)
    _settle_values(state, [item for item in items if isinstance(item, Expr)])
    return "".join(item if isinstance(item, str) else state.values[item.number] for item in items)


def _run_all(state: Executor, work: Sequence[Callable[[], Any]]) -> list[Any]:
    """Results in order; the first failure is raised after all have ended."""
    if not state.run.options.concurrent or len(work) < 2:
        return [one() for one in work]
    futures: list[Future[Any]] = [Future() for _ in work]
    threads = [_in_thread(state, future, one) for future, one in zip(futures, work, strict=True)]
    for thread in threads:
        thread.join()
    return [future.result() for future in futures]


def _in_thread(state: Executor, future: Future[Any], work: Callable[[], Any]) -> threading.Thread:
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
    state.set(assign.name, _resolved(state, value) if isinstance(value, str | Expr) else value)


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
