"""Runs the steps of a script one after another, each where the one before has ended. Leaves HTTP to reply.

    prompt ids | text so far without ids | step
    `---- known ----'`----- encoded when the next generation or select needs it

Ids that were generated are never tokenised again, so every step's prompt is found in the radix tree whole.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from services.tokenizer import constraints
from services.tokenizer.context import Context
from services.tokenizer.errors import ClientGone
from services.tokenizer.metrics import RequestTimer
from services.tokenizer.output import Output
from services.tokenizer.render.native import NativeAnswerer, NativeItem
from services.tokenizer.scripts.body import ScriptBody, SelectStep, check_parts, check_steps
from services.tokenizer.scripts.choose import choose, mean, shared_length
from services.tokenizer.scripts.cut import continuation
from services.tokenizer.scripts.parts import Piece, encode_parts, encode_run
from services.tokenizer.scripts.prompts import Generation, Steps
from services.tokenizer.streams import Group


class GivenUp(Exception):
    """An abort came between two steps."""


class Event(NamedTuple):
    """News of part `part`: `text` that was added, or `whole` when it is complete. Neither: nothing has happened."""

    part: int = -1
    text: str = ""
    whole: dict[str, Any] | None = None


class Chain:
    """One script. Raises ApiError for steps that make none; close it at the end, whatever happened."""

    def __init__(self, context: Context, body: ScriptBody, timer: RequestTimer) -> None:
        check_parts(body.prompt_parts, context.model.vocab_size, context.limit)
        check_steps(body.steps, context.config.max_batch_size)
        self._context = context
        self._body = body
        self._timer = timer
        self._steps = Steps(context, body)
        self._wanted = {i: self._steps.check(i, step.gen) for i, step in enumerate(body.steps) if step.gen is not None}
        work = [index for index, step in enumerate(body.steps) if step.work is not None]
        self._first, self._last = work[0], work[-1]
        self._ids = array("i")
        self._pieces: list[Piece] = []
        self._texts: list[str] = []  # of generations and selects
        self._with_deltas = bool(body.stream) and body.deltas is not False
        self.group: Group | None = None
        self.gone = False  # nobody is left to answer
        self.complete = False

    @property
    def rid(self) -> str:
        return self._steps.rid

    @property
    def unknown(self) -> list[str]:
        """Fields nobody here knows."""
        return sorted({name for wanted in self._wanted.values() for name in wanted.unknown})

    @property
    def compiles(self) -> bool:
        """Whether a constraint has to be compiled before anything comes."""
        first = self._wanted.get(self._first)
        return first is not None and constraints.read(first.fields, first.names) is not None

    def nudge(self) -> None:
        """Let whoever waits for an event look around."""
        if self.group is not None:
            self.group.nudge()

    def close(self) -> None:
        """End what runs."""
        if self.group is not None:
            self._context.frontend.close(self.group)

    async def begin(self) -> None:
        """Encode the prompt."""
        engine, limit = self._context.text, self._context.limit
        parts = list(self._body.prompt_parts)
        tail: list[Piece] = []
        while parts and parts[-1].text is not None:  # text before the first step is tokenised with that step's
            tail.append(Piece(parts[-1].text, bool(parts.pop().literal)))
        self._pieces = tail[::-1]
        self._ids = await encode_parts(engine, parts, limit, templated=bool(self._body.templated))

    async def events(self) -> AsyncIterator[Event]:
        """News of all parts in order. Raises ApiError where a step fails; what came before it stands."""
        for index, step in enumerate(self._body.steps):
            if step.gen is not None:
                news = self._generate(self._wanted[index], last=index == self._last)
            elif step.select is not None:
                news = self._select(step.select)
            else:
                text = self._texts[step.again] if step.again is not None else step.text or ""
                self._pieces.append(Piece(text, bool(step.literal)))
                continue
            aborted = False
            try:
                async for event in news:
                    yield event
                    aborted = event.whole is not None and _is_aborted(event.whole)
            except GivenUp:
                return
            if aborted:
                return
            if index == self._last:
                self.complete = True
                return

    async def _generate(self, wanted: Generation, *, last: bool) -> AsyncIterator[Event]:
        part, ids = len(self._texts), await self._prompt()
        group, item = self._steps.generation(wanted, ids, last=last)
        so_far = Output(*group.streams[0].widths)
        async for news in self._run(group):
            for output in news:
                so_far.join(output)
            if self._with_deltas or not news:
                yield Event(part, "".join(output.text for output in news))
        answer = NativeAnswerer([item], False, False, self._timer.started).answer(0, so_far)
        kept, rest = await continuation(self._context.text, so_far)
        self._go_on(ids, kept, rest, so_far.text)
        yield Event(part, whole={"name": wanted.step.name, **answer})

    async def _select(self, step: SelectStep) -> AsyncIterator[Event]:
        part, bare = len(self._texts), await self._prompt()
        lists = [await self._prompt(Piece(choice, bool(step.literal))) for choice in step.choices]
        start = shared_length([bare, *lists])
        group = self._steps.scoring(lists, start)
        outputs = [Output(*stream.widths) for stream in group.streams]
        async for _ in self._run(group, outputs):
            yield Event(part)
        columns = [output.prompt_scores for output in outputs]
        scores = [
            [p for p in (found.logprob(i) for i in range(len(found))) if p is not None] if found is not None else []
            for found in columns
        ]
        place, matrix = choose(step.method or "token_length_normalized", scores)
        won = NativeItem(rid=self.rid, prompt_ids=lists[place], return_prompt_ids=True)
        answer = NativeAnswerer([won], False, False, self._timer.started).answer(0, outputs[place])
        rows = [
            [[logprob, token, None] for logprob, token in zip(numbers, ids[len(ids) - len(numbers) :], strict=True)]
            for numbers, ids in zip(scores, lists, strict=True)
        ]
        answer["meta_info"] |= {
            "normalized_prompt_logprobs": [mean(numbers) for numbers in scores],
            "input_token_logprobs": rows,
            **({"greedy_logprob_matrix": matrix} if matrix is not None else {}),
        }
        self._go_on(lists[place], (), "", step.choices[place])
        yield Event(part, whole={"name": step.name, **answer, "text": step.choices[place]})

    async def _prompt(self, *more: Piece) -> array[int]:
        """Ids of everything so far, and of one more piece of text."""
        opening = not self._ids and not self._body.templated
        pieces = [*self._pieces, *more]
        return self._ids + await encode_run(self._context.text, pieces, self._context.limit, opening=opening)

    def _go_on(self, ids: array[int], more: Any, rest: str, text: str) -> None:
        self._ids = ids + array("i", more)
        self._pieces = [Piece(rest, True)] if rest else []
        self._texts.append(text)

    async def _run(self, group: Group, outputs: list[Output] | None = None) -> AsyncIterator[list[Output]]:
        """What is new, until all streams of the group have ended; nothing new where somebody nudged."""
        if self.gone:
            raise ClientGone
        before = self.group
        if before is not None and before.unwanted:
            raise GivenUp
        self.group = group
        if before is None:
            self._context.frontend.submit(group)
        else:
            self._context.frontend.follow(before, group)
        while not group.done or group.has_news:
            await group.wait()
            if self.gone:
                raise ClientGone
            found: list[Output] = []
            for stream in group.take_ready():
                output = stream.take()
                if output is not None:
                    self._timer.news(0, output)
                    found.append(output)
                    if outputs is not None:
                        outputs[stream.index].join(output)
                if stream.error is not None:
                    raise stream.error
            yield found


def _is_aborted(answer: dict[str, Any]) -> bool:
    finish = answer["meta_info"]["finish_reason"]
    return finish is not None and finish["type"] == "abort"
