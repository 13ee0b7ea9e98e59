"""Constraints become grammars, without the loop ever waiting: equal ones once, in processes that can be killed.

    compile(constraint) -> canonical form -> cached? -> being compiled? -> process tries it out -> thread builds it

Leaves following an output to ConstraintState and filling masks to MaskFiller.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import structlog
from msgspec import Struct

from services.scheduler.constraint.budget import Ending
from services.scheduler.constraint.canonical import JSON_KINDS, canonical, check_unicode, key
from services.scheduler.constraint.completion import TokenOrder
from services.scheduler.constraint.errors import BadSource, CompilerBusy, ConstraintError
from services.scheduler.constraint.grammar import CompiledGrammar, GrammarCache
from services.scheduler.constraint.limits import Limits
from services.scheduler.constraint.llguidance_matcher import LLGuidanceMatcher
from services.scheduler.constraint.pool import ProcessPool
from services.scheduler.constraint.process import ProcessGone, TookTooLong
from services.scheduler.constraint.protocol import (
    Canonical,
    CanonicalJob,
    CheckJob,
    Compiled,
    CompileJob,
    Refused,
    Verdict,
)
from services.scheduler.constraint.vocabulary import Vocabulary
from shared.messages.request import Constraint

log = structlog.get_logger(__name__)

_SMALL = 8 << 10  # bytes of source that the loop's thread canonicalises itself
_REFUSALS = 256
_REMEMBER_SECONDS = 60.0  # a source that was killed may have been unlucky
_NICE = 5


class CompilerStats(Struct):
    """Counters since the start."""

    hits: int = 0
    compiled: int = 0
    refused: int = 0
    killed: int = 0


class Compiler:
    """Made by `start`; every method belongs to one event loop's thread."""

    def __init__(self, model_path: str, limits: Limits, *, processes: int, cache_bytes: int, most_waiting: int) -> None:
        self.cache = GrammarCache(cache_bytes)
        self.stats = CompilerStats()
        self._limits = limits
        self._pool = ProcessPool(model_path, limits, processes)
        self._thread = ThreadPoolExecutor(1, "grammars", initializer=_be_nice)
        self._jobs: dict[bytes, asyncio.Task[CompiledGrammar]] = {}
        self._waiters: dict[bytes, int] = {}
        self._most_waiting = most_waiting
        self._refusals: OrderedDict[bytes, tuple[float, str, str]] = OrderedDict()
        self._model_path = model_path

    @classmethod
    async def start(
        cls,
        model_path: str,
        limits: Limits | None = None,
        *,
        processes: int = 2,
        cache_bytes: int = 256 << 20,
        most_waiting: int = 512,
        order: TokenOrder | None = None,
    ) -> Compiler:
        """Ready for the first constraint; `order` is what `load` gave, where it was called before.

        Raises VocabularyError or ProcessGone.
        """
        limits = limits or Limits()
        compiler = cls(model_path, limits, processes=processes, cache_bytes=cache_bytes, most_waiting=most_waiting)
        try:
            compiler.order = order or await load(model_path)
            compiler.vocabulary = compiler.order.vocabulary
            await compiler._pool.start()
        except BaseException:
            await compiler.close()
            raise
        return compiler

    vocabulary: Vocabulary
    order: TokenOrder

    async def close(self) -> None:
        """Kill the processes; whoever still waits is cancelled."""
        for task in list(self._jobs.values()):
            task.cancel()
        await asyncio.gather(*self._jobs.values(), return_exceptions=True)
        await self._pool.close()
        self._thread.shutdown(wait=True)

    async def compile(self, constraint: Constraint) -> CompiledGrammar:
        """The grammar of a constraint. Raises ConstraintError or CompilerBusy.

        Cancelling one waiter leaves the others alone; a compile that nobody waits for any more is given up.
        """
        text = await self._canonical(constraint)
        name = _key(constraint, text)
        held = self.cache.get(name)
        if held is not None:
            self.stats.hits += 1
            return held
        self._raise_remembered(constraint, name)
        task = self._jobs.get(name)
        if task is None:
            if len(self._jobs) >= self._most_waiting:
                raise CompilerBusy(f"{len(self._jobs)} constraints wait to be compiled")
            task = asyncio.create_task(self._compile(constraint, text, name))
            self._jobs[name] = task
            task.add_done_callback(partial(self._forget, name))
        return await self._join(name, task)

    async def check(self, constraint: Constraint, text: str) -> Verdict:
        """Does a finished text satisfy its constraint? Never raises for a bad source or text."""
        try:
            source = await self._canonical(constraint)
            job = CheckJob(constraint.kind, source, text.encode("utf-8", "replace").decode())
            answer = await self._pool.ask(job, self._limits.check_seconds)
        except ConstraintError as error:
            return Verdict(False, str(error), known=False)
        except ProcessGone as error:
            return Verdict(False, f"the check could not be finished: {error}", known=False)
        assert isinstance(answer, Verdict)
        return answer

    async def _canonical(self, constraint: Constraint) -> str:
        kind, source = constraint.kind, constraint.source
        size = len(source.encode("utf-8", "surrogatepass"))
        if size > self._limits.source_bytes:
            raise ConstraintError(kind, f"{size} bytes are more than the {self._limits.source_bytes} allowed")
        try:
            if size <= _SMALL or kind not in JSON_KINDS:
                return canonical(kind, source)
            check_unicode(source)
            answer = await self._pool.ask(CanonicalJob(kind, source), self._limits.compile_seconds)
        except BadSource as error:
            raise ConstraintError(kind, error.reason, error.place) from None
        except ProcessGone:
            raise ConstraintError(kind, "reading it takes too much time or memory") from None
        if isinstance(answer, Refused):
            raise ConstraintError(kind, answer.reason, answer.place)
        assert isinstance(answer, Canonical)
        return answer.source

    async def _join(self, name: bytes, task: asyncio.Task[CompiledGrammar]) -> CompiledGrammar:
        self._waiters[name] = self._waiters.get(name, 0) + 1
        try:
            return await asyncio.shield(task)
        finally:
            self._waiters[name] -= 1
            if not self._waiters[name]:
                del self._waiters[name]
                if not task.done():
                    self._forget(name, task)  # who asks now must not find a dying task
                    task.cancel()

    async def _compile(self, constraint: Constraint, text: str, name: bytes) -> CompiledGrammar:
        job = CompileJob(constraint.kind, text, constraint.best_effort, constraint.any_whitespace)
        try:
            answer = await self._pool.ask(job, self._limits.compile_seconds)
        except TookTooLong:
            reason = f"compiling it takes more than {self._limits.compile_seconds:g} seconds"
            raise self._killed(constraint, name, reason) from None
        except ProcessGone as error:
            log.warning("compiler_died", kind=constraint.kind, error=str(error))
            raise self._killed(constraint, name, "compiling it takes too much memory") from None
        if isinstance(answer, Refused):
            self.stats.refused += 1
            self._remember(name, float("inf"), answer.reason, answer.place)
            raise ConstraintError(constraint.kind, answer.reason, answer.place)
        assert isinstance(answer, Compiled)
        grammar = await self._build(constraint, answer)
        self.stats.compiled += 1
        self.cache.put(name, grammar)
        return grammar

    async def _build(self, constraint: Constraint, answer: Compiled) -> CompiledGrammar:
        loop = asyncio.get_running_loop()
        build = partial(_build, answer.grammar, self.vocabulary, self._limits)
        base, opening = await loop.run_in_executor(self._thread, build)
        if base.error:
            raise ConstraintError(constraint.kind, base.error)
        ending = Ending(answer.shortest, answer.step, answer.plain_is_harmless)
        size = answer.grown + len(answer.grammar)
        return CompiledGrammar(constraint.kind, base, ending, self.order, size, opening)

    def _killed(self, constraint: Constraint, name: bytes, reason: str) -> ConstraintError:
        self.stats.killed += 1
        self._remember(name, asyncio.get_running_loop().time() + _REMEMBER_SECONDS, reason, "")
        return ConstraintError(constraint.kind, reason)

    def _remember(self, name: bytes, until: float, reason: str, place: str) -> None:
        self._refusals[name] = (until, reason, place)
        if len(self._refusals) > _REFUSALS:
            self._refusals.popitem(last=False)

    def _raise_remembered(self, constraint: Constraint, name: bytes) -> None:
        until, reason, place = self._refusals.get(name, (0.0, "", ""))
        if asyncio.get_running_loop().time() < until:
            raise ConstraintError(constraint.kind, reason, place)
        self._refusals.pop(name, None)

    def _forget(self, name: bytes, task: asyncio.Task[CompiledGrammar]) -> None:
        if self._jobs.get(name) is task:
            del self._jobs[name]


def _key(constraint: Constraint, text: str) -> bytes:
    return key(constraint.kind, text, best_effort=constraint.best_effort, any_whitespace=constraint.any_whitespace)


async def load(model_path: str) -> TokenOrder:
    """The model's tokens. For about a second this holds the interpreter for long stretches, whatever the thread.

    Raises VocabularyError, OSError or ValueError.
    """
    return await asyncio.get_running_loop().run_in_executor(None, _load, model_path)


def _load(model_path: str) -> TokenOrder:
    vocabulary = Vocabulary.load(model_path)
    order = TokenOrder(vocabulary)
    # computed here, not at the first mask that needs them
    assert order.plain.size == order.prose.size == vocabulary.words
    assert len(order.quiet) == vocabulary.size
    return order


def _build(grammar: str, vocabulary: Vocabulary, limits: Limits) -> tuple[LLGuidanceMatcher, tuple[int, ...]]:
    """The matcher, and the tokens that every text begins with."""
    base = LLGuidanceMatcher.build(grammar, vocabulary, limits)
    return base, tuple(base.fork().forced_tokens())


def _be_nice() -> None:
    """Building large grammars must not take a core from running streams."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
