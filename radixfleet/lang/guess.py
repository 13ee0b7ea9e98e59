"""Several generations from one call of an API that has no scripts: `function(num_api_spec_tokens=256)`.

    s += "Name:" + gen("name", stop="\\n") + "\\nJob:" + gen("job", stop="\\n")
    the model goes on    " Ann\\nJob: pilot\\nWelcome."
    values               " Ann"      " pilot"            as long as the program's own text stands between them

Whatever does not fit is asked for as usual. Leaves requests to the backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from radixfleet.backend.base import Answer, GenStep, Prompt, Step, TextPart
from radixfleet.lang import chain
from radixfleet.lang.ir import Expr, Gen, RoleBegin, RoleEnd

if TYPE_CHECKING:
    from radixfleet.lang.executor import Executor


class Guess:
    """Answers that one call brought, for expressions in their order."""

    def __init__(self, work: Sequence[Expr], answers: Sequence[Answer]) -> None:
        self._left = list(zip(work, answers, strict=False))

    @property
    def done(self) -> bool:
        return not self._left

    def __contains__(self, item: Expr) -> bool:
        return bool(self._left) and self._left[0][0] is item

    def take(self, say: Callable[[str], None]) -> Answer:
        answer = self._left.pop(0)[1]
        say(answer.text)
        return answer

    def close(self) -> None:
        """Nothing runs."""


def ask(state: Executor, item: Gen, tokens: int) -> Guess | None:
    """One call for this generation and those after it in the same turn; None where that cannot save one."""
    turn: list[object] = [item]
    for later in state.ahead():
        if isinstance(later, RoleBegin | RoleEnd):
            break
        turn.append(later)
    found, _ = chain.find(state, turn)
    steps = _plain(found.steps)
    prompt = state.transcript.prompt()
    begun = prompt.messages[-1].content if prompt.open_role == "assistant" else ""
    if sum(isinstance(step, GenStep) for step in steps) < 2 and not begun:
        return None
    first = steps[0]
    assert isinstance(first, GenStep), "a chain begins with the expression at hand"
    wish = replace(first.sampling, max_new_tokens=tokens, stop=None)
    written = state.run.generate(_without_begun(prompt), wish).text
    at = written.find(begun)
    if at < 0:
        return None
    written = written[at + len(begun) :]
    answers = match(written, steps)
    return Guess(found.work, answers) if answers else None


def match(written: str, steps: Sequence[Step]) -> list[Answer]:
    """Values of the generations among `steps` that begin `written`, up to the first that does not fit."""
    answers: list[Answer] = []
    for index, step in enumerate(steps):
        if isinstance(step, TextPart):
            if not written.startswith(step.text):
                break
            written = written[len(step.text) :]
        elif isinstance(step, GenStep):
            following = steps[index + 1] if index + 1 < len(steps) else None
            ends = [*(step.sampling.stop or ()), *([following.text] if isinstance(following, TextPart) else [])]
            places = [(written.find(end), end) for end in ends if end in written]
            if ends and not places:
                break
            end, matched = min(places, default=(len(written), None))
            answers.append(Answer(written[:end], {"finish_reason": {"type": "stop", "matched": matched}}))
            written = written[end:]
    return answers


def _plain(steps: Sequence[Step]) -> list[Step]:
    """Those before the first that is neither text nor a generation without constraints."""
    plain: list[Step] = []
    for step in steps:
        bound = isinstance(step, GenStep) and (step.sampling.json_schema is not None or step.sampling.return_logprob)
        if bound or not isinstance(step, TextPart | GenStep):
            break
        plain.append(step)
    return plain


def _without_begun(prompt: Prompt) -> Prompt:
    """The conversation before what has been said of the open turn: such APIs begin each turn anew."""
    if prompt.open_role != "assistant":
        return prompt
    *before, last = prompt.messages
    return replace(prompt, messages=(*before, replace(last, content="")))
