"""The compiling process: reads a source, tries its grammar out, answers; one job at a time.

    python -m services.scheduler.constraint.compile_worker      (frames on stdin and stdout, see `protocol`)

It bounds its own memory and processor time, so that a hostile source ends this process and nothing else; the
wall clock is the parent's. It exits when its input closes, even in the middle of a job.
"""

from __future__ import annotations

import math
import os
import queue
import resource
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

import numpy as np
from numpy.typing import NDArray

from services.scheduler.constraint.canonical import canonical, read_json
from services.scheduler.constraint.completion import DEAD_END, Search, TokenOrder, allowed
from services.scheduler.constraint.errors import BadSource
from services.scheduler.constraint.limits import Limits
from services.scheduler.constraint.llguidance_matcher import LLGuidanceMatcher
from services.scheduler.constraint.matcher import Matcher
from services.scheduler.constraint.protocol import (
    LENGTH_BYTES,
    MAX_FRAME,
    Canonical,
    CanonicalJob,
    CheckJob,
    Compiled,
    CompileJob,
    FromProcess,
    Job,
    Ready,
    Refused,
    Setup,
    ToProcess,
    Verdict,
    frame,
    to_process,
)
from services.scheduler.constraint.regex_source import first_line
from services.scheduler.constraint.schema_size import has_hidden_obligations, largest_step
from services.scheduler.constraint.sources import GrammarText, Options, explain_error, read_source
from services.scheduler.constraint.verdict import check_text
from services.scheduler.constraint.vocabulary import Vocabulary
from services.scheduler.constraint.witness import completion_by_witness

_NICE = 5  # running streams come first
_LONGEST = 1024  # tokens of a completion that is still looked for
_WALK = 48  # tokens of a text that is tried out
_WALK_SECONDS = 0.25  # of processor time
_SOME_STEP = 64  # of grammars whose parts are not measured


class Worker:
    def __init__(self, setup: Setup) -> None:
        self._limits = setup.limits
        self._vocabulary = Vocabulary.load(setup.model_path)
        self._order = TokenOrder(self._vocabulary)
        self._row = np.zeros(self._vocabulary.words, np.int32)
        self._seed = np.random.SeedSequence(0)  # made here: its module takes memory that no job is to pay for

    @property
    def vocabulary_size(self) -> int:
        return self._vocabulary.size

    def answer(self, job: Job) -> FromProcess:
        try:
            if isinstance(job, CanonicalJob):
                return Canonical(canonical(job.kind, job.source))
            if isinstance(job, CompileJob):
                return self.compile(job)
            return check_text(job.kind, job.source, job.text, self._limits, self._vocabulary)
        except BadSource as error:
            if isinstance(job, CheckJob):
                return Verdict(False, str(error), known=False)
            return Refused(error.reason, error.place)
        except (MemoryError, RecursionError) as error:
            return Refused(f"too large ({type(error).__name__})", "")

    def compile(self, job: CompileJob) -> Compiled:
        """Read it, build it, and go through a whole shortest text: some limits only show on the way."""
        started, before = time.perf_counter(), memory()
        options = Options(job.best_effort, job.any_whitespace)
        grammar = read_source(job.kind, job.source, options, self._limits, self._vocabulary)
        matcher = LLGuidanceMatcher.build(grammar.text, self._vocabulary, self._limits)
        self._check(job, grammar, matcher)
        search = Search(self._order, self._limits.search_nodes)
        shortest = search.shortest(matcher, _LONGEST)
        broken = self._walk(matcher) or ("" if shortest else search.broken)
        if broken:
            raise BadSource(f"the grammar is too complex: {first_line(broken)}")
        step, harmless = _SOME_STEP + (len(shortest) if shortest else 0), False
        if job.kind == "json_schema":
            schema = read_json(job.source)
            if shortest is None:
                shortest = completion_by_witness(schema, matcher, self._order, self._limits)
            step, harmless = largest_step(schema, self._limits.depth), not has_hidden_obligations(schema)
        grown = max(0, memory() - before)
        if grown > self._limits.grammar_memory:
            raise BadSource(f"it takes {grown >> 20} MB of memory, {self._limits.grammar_memory >> 20} MB are allowed")
        return Compiled(
            grammar=grammar.text,
            shortest=tuple(shortest) if shortest is not None else None,
            step=step,
            plain_is_harmless=harmless,
            seconds=time.perf_counter() - started,
            grown=grown,
        )

    def _check(self, job: CompileJob, grammar: GrammarText, matcher: LLGuidanceMatcher) -> None:
        if matcher.error:
            raise explain_error(job.kind, grammar, matcher.error)
        trial = matcher.fork()
        filled = trial.fill_mask(self._row)
        if trial.error.startswith("NoExtension"):
            raise BadSource("no text satisfies it")
        if not filled:
            raise BadSource(f"the grammar is too complex: {first_line(trial.error)}")
        if trial.is_stopped and trial.is_complete:
            raise BadSource("nothing but the empty text is allowed")
        for token in self._vocabulary.eos_ids:
            self._row[token >> 5] &= ~np.int32(np.uint32(1 << (token & 31)).view(np.int32))
        if not self._row.any():
            raise BadSource("no text satisfies it")

    def _walk(self, matcher: Matcher) -> str:
        """Follow one text drawn from the masks, for a while: why the engine gives up on it, if it does."""
        draw, trial, drawn = np.random.default_rng(self._seed), matcher.fork(), False
        until = time.process_time() + _WALK_SECONDS
        for _ in range(_WALK):
            ids: Sequence[int] = trial.forced_tokens()
            if not ids and trial.fill_mask(self._row):
                going_on = self._without_ends(allowed(self._row, self._vocabulary))
                ids, drawn = draw.choice(going_on, 1).tolist() if going_on.size else (), True
            if not ids or not trial.advance(ids) or trial.is_stopped:
                break
            if time.process_time() > until:
                break
        if trial.error.startswith(DEAD_END) and not drawn:
            raise BadSource("no text satisfies it")  # what every text begins with leads nowhere
        return "" if trial.error.startswith(DEAD_END) else trial.error

    def _without_ends(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        return tokens[np.isin(tokens, self._vocabulary.eos_ids, invert=True)]


def memory() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def limit_memory(more: int) -> None:
    """Let the address space grow by `more` bytes and no further."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + more, now + more))


def limit_processor(seconds: float) -> None:
    """Be killed after so many more seconds of processor time (up to one more: the kernel counts whole ones)."""
    until = math.ceil(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))


def read_frames(source: IO[bytes], jobs: queue.SimpleQueue[ToProcess]) -> None:
    """Runs on a thread of its own: the end of the input ends the process, whatever it is doing."""
    while True:
        head = source.read(LENGTH_BYTES)
        size = int.from_bytes(head, "little")
        body = source.read(size) if len(head) == LENGTH_BYTES and size <= MAX_FRAME else b""
        if not body or len(body) < size:
            os._exit(0)
        jobs.put(to_process.decode(body))


def main() -> None:
    os.nice(_NICE)
    jobs: queue.SimpleQueue[ToProcess] = queue.SimpleQueue()
    threading.Thread(target=read_frames, args=(sys.stdin.buffer, jobs), daemon=True).start()
    setup = jobs.get()
    assert isinstance(setup, Setup)
    worker = Worker(setup)
    limits: Limits = setup.limits
    limit_memory(limits.compile_memory)
    _send(Ready(worker.vocabulary_size))
    while True:
        job = jobs.get()
        assert not isinstance(job, Setup)
        limit_processor(limits.check_seconds if isinstance(job, CheckJob) else limits.compile_seconds)
        _send(worker.answer(job))


def _send(message: FromProcess) -> None:
    sys.stdout.buffer.write(frame(message))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
