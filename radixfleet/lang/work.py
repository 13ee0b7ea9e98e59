"""What a model does for a program: generations and selects, each in a request of its own or as a step of a script.

Leaves what comes before and after them to evaluate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from radixfleet.backend.base import Answer
from radixfleet.lang import chain, guess
from radixfleet.lang.choices import ChoicesDecision, mean, values
from radixfleet.lang.feed import Feed
from radixfleet.lang.ir import Gen, Select
from radixfleet.lang.values import append_known, resolved, start_calls

if TYPE_CHECKING:
    from radixfleet.lang.executor import Executor


def do_work(state: Executor, item: Gen | Select) -> None:
    """What the model has to do, in a request of its own or as a step of a script."""
    if append_known(state, item):
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
        tokens = state.run.guess_tokens
        if tokens and isinstance(item, Gen) and state.run.backend.wants_guesses:
            state.feed = guess.ask(state, item, tokens)
            return _taken(state, item) if state.feed is not None else None
        if not (options.script and options.merge and state.run.backend.has_scripts):
            return None
        found, is_open = chain.find(state, [item, *state.ahead(wait=False)])
        if is_open and not state.run.inline:
            found, _ = chain.find(state, [item, *state.ahead()])
        if not found.worth:
            return None
        state.feed = Feed(state, found)
    return _taken(state, item)


def _taken(state: Executor, item: Gen | Select) -> Answer:
    assert state.feed is not None
    answer = state.feed.take(lambda text: state.say(text, item.name))
    if state.feed.done:
        state.drop_feed()
    return answer


def _gen(state: Executor, gen: Gen, answer: Answer | None) -> None:
    sampling = gen.sampling.over(state.run.sampling)
    if answer is not None:
        state.say("", gen.name, answer.meta)
    elif state.run.stream and sampling.n in (None, 1):
        answer = Answer("")
        shown = 0
        for answer in state.run.stream_answers(state.transcript.prompt(), sampling):
            state.say(answer.text[shown:], gen.name, answer.meta)
            shown = len(answer.text)
    else:
        answer = state.run.generate(state.transcript.prompt(), sampling)
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
        options = [resolved(state, option) for option in select.options]
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
