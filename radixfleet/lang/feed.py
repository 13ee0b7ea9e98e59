"""Answers of a chain, one by one as the executor comes to them: from one script, or from another item's of the batch.

    item 1   P a b c      opens a script for a, b and c
    item 2   P a b d      takes a and b from it, and opens one of its own for d

Only repeatable steps are shared, each after the same prompt and the same steps. A failure is never shared: whoever
waits for it goes on alone. Leaves finding chains to chain.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from radixfleet.backend.base import AgainStep, Answer, GenStep, News, SelectStep, Step, TextPart
from radixfleet.backend.errors import BackendError
from radixfleet.lang.chain import Chain
from radixfleet.lang.ir import Expr
from radixfleet.lang.shared_work import prompt_key

if TYPE_CHECKING:
    from radixfleet.lang.executor import Executor

Say = Callable[[str], None]


class Feed:
    """The answers of one chain. Close it wherever evaluation ends early."""

    def __init__(self, state: Executor, chain: Chain) -> None:
        self._state = state
        self._run = state.run
        self._chain = chain
        self._texts: list[str] = []  # of the answers so far
        self._news: Iterator[News] | None = None
        self._first = 0  # number of the first step that the script has
        self._theirs: list[Future[Answer]] = []
        self._ours: dict[int, tuple[Hashable, Future[Answer]]] = {}  # by number
        if self._run.options.share and not self._run.stream:
            self._claim(_keys(state, chain))

    @property
    def done(self) -> bool:
        return len(self._texts) == len(self._chain.work)

    def __contains__(self, item: Expr) -> bool:
        number = len(self._texts)
        return number < len(self._chain.work) and self._chain.work[number] is item

    def take(self, say: Say) -> Answer:
        """The next answer; `say` gets its text as it comes. Raises BackendError."""
        number = len(self._texts)
        answer = self._from_others(number)
        if answer is None:
            answer = self._own(number, say)
        else:
            say(answer.text)
        self._texts.append(answer.text)
        return answer

    def close(self) -> None:
        """End the script if it still runs; nobody waits for what does not come any more."""
        news, self._news = self._news, None
        if news is not None:
            news.close()  # type: ignore[attr-defined]
        for key, future in self._ours.values():
            self._run.shared.withdraw(key, future)
        self._ours.clear()

    def _claim(self, keys: Sequence[Hashable]) -> None:
        for number, (key, (future, is_ours)) in enumerate(zip(keys, self._run.shared.claim(keys), strict=True)):
            if is_ours:
                self._ours[number] = (key, future)
            else:
                self._theirs.append(future)

    def _from_others(self, number: int) -> Answer | None:
        if number >= len(self._theirs):
            return None
        future = self._theirs[number]
        if future.exception() is None:
            self._run.shared.count_reuse()
            return future.result()
        del self._theirs[number:]
        return None

    def _own(self, number: int, say: Say) -> Answer:
        if self._news is None:
            self._first = number
            self._news = self._open(number)
        said = ""
        for news in self._news:
            if news.answer is None:
                said += news.text
                say(news.text)
                continue
            if not said:
                say(news.answer.text)
            if number in self._ours:
                self._ours.pop(number)[1].set_result(news.answer)
            if number + 1 == len(self._chain.work):
                self._finish()
            return news.answer
        raise BackendError("the server ended a script before it was complete")

    def _finish(self) -> None:
        """Read the stream to its end, so that its connection can be used again."""
        with contextlib.suppress(BackendError):  # everything is there already
            for _ in self._news or ():
                continue

    def _open(self, number: int) -> Iterator[News]:
        steps, prompt = _steps_from(self._chain, number, self._texts), self._state.transcript.prompt()
        with self._run.tagged() as tag:
            yield from self._run.backend.script(prompt, steps, tag, deltas=self._run.stream)


def _keys(state: Executor, chain: Chain) -> list[Hashable]:
    """One for each step that may be shared: those before the first that would not come out the same twice."""
    prompt = prompt_key(state.transcript.prompt())
    keys: list[Hashable] = []
    for end, step in enumerate(chain.steps, 1):
        if isinstance(step, GenStep) and not step.sampling.repeatable:
            break
        if isinstance(step, GenStep | SelectStep):
            keys.append((prompt, step.sampling) if end == 1 and isinstance(step, GenStep) else _key(prompt, chain, end))
    return keys


def _key(prompt: Hashable, chain: Chain, end: int) -> Hashable:
    return (prompt, tuple(chain.steps[:end]))


def _steps_from(chain: Chain, number: int, texts: Sequence[str]) -> list[Step]:
    """The steps from work `number` on; what repeats an answer that is there already is text."""
    start = [at for at, step in enumerate(chain.steps) if isinstance(step, GenStep | SelectStep)][number]
    steps: list[Any] = []
    for step in chain.steps[start:]:
        if not isinstance(step, AgainStep):
            steps.append(step)
        elif step.number < number:
            steps.append(TextPart(texts[step.number], step.literal))
        else:
            steps.append(AgainStep(step.number - number, step.literal))
    return steps
