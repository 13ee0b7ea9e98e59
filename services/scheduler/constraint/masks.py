"""Fills the masks of a step off the loop's thread: a packed row for each masked sample, in the order it was asked for.

Every job is answered exactly once, whatever its rows do: a row without a state, or whose matcher breaks, gets
all ones, and only its own request hears of it. Leaves sending the masks to the loop.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from services.scheduler.constraint.state import ALL_ALLOWED, ConstraintState, allows

ALL_USEFUL = 1 << 30
LATE_MS = 25.0  # of masks behind guesses, of one row: no more are begun then
_NICE = 5
_ROWS_PER_THREAD = 32  # fewer are not worth another thread


class RowJob(Struct, frozen=True):
    """One masked slot: tokens its request was given since the last job, and how many it may still get.

    With guesses of what is sampled next it is a mask more for each, that of the sample behind the guess.
    """

    state: ConstraintState | None  # None: the request has ended, but its row is still owed
    accepted: tuple[int, ...] = ()
    budget: int = 1
    guesses: tuple[int, ...] = ()


class RowOutcome(Struct, frozen=True):
    """`forced` follow by necessity, the first is the only one the mask allows. `stopped`: nothing may follow.

    `ahead`: the states behind the guesses, as far as these are allowed and masks were filled. `useful`: so many samples
    may count, the one before the guesses included; with the last of them the text is complete, or, where it is `cut`,
    the next mask was not to be had. `elapsed_ms`: of the slowest mask.
    """

    forced: tuple[int, ...] = ()
    stopped: bool = False
    error: str = ""
    elapsed_ms: float = 0.0
    complete: bool = False  # of a verdict: the text satisfies its grammar as it is
    useful: int = ALL_USEFUL
    cut: bool = False
    ahead: tuple[ConstraintState, ...] = ()


class FilledMasks(Struct, frozen=True):
    """`bitmask`: int32 [rows, words], C-contiguous, the second frame of TokenMasks as it is."""

    bitmask: NDArray[np.int32]
    outcomes: tuple[RowOutcome, ...]
    elapsed_ms: float

    @property
    def data(self) -> memoryview:
        return self.bitmask.data.cast("B")


class MaskFiller:
    """`words` uint32 words per row, as wide as the worker's vocabulary."""

    def __init__(self, words: int, threads: int = 0) -> None:
        self._words = words
        self._threads = threads or min(4, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="masks")
        self._slow = ThreadPoolExecutor(1, "slow-masks", initializer=_be_nice)

    def submit(self, jobs: Sequence[RowJob]) -> Future[FilledMasks]:
        """Never blocks. The future always gets a result; its callbacks run on a thread of the pool."""
        answer: Future[FilledMasks] = Future()
        batch = _Batch(jobs, self._words, answer)
        chunks = max(1, min(self._threads, batch.rows // _ROWS_PER_THREAD))
        batch.split(chunks)
        for chunk in range(chunks):
            self._pool.submit(batch.run, chunk)
        return answer

    def prepare(self, job: RowJob) -> Future[FilledMasks]:
        """One row that is known to take long: it holds up only others of its kind."""
        answer: Future[FilledMasks] = Future()
        self._slow.submit(_Batch([job], self._words, answer).run, 0)
        return answer

    def judge(self, state: ConstraintState, accepted: tuple[int, ...]) -> Future[RowOutcome]:
        """Whether the text is complete after its last tokens; no mask is filled."""
        return self._pool.submit(judge_row, state, accepted)

    def close(self) -> None:
        """Finish what was submitted."""
        self._pool.shutdown(wait=True)
        self._slow.shutdown(wait=True)


class _Batch:
    def __init__(self, jobs: Sequence[RowJob], words: int, answer: Future[FilledMasks]) -> None:
        self._jobs = jobs
        self._places = [0, *accumulate(1 + len(job.guesses) for job in jobs)]
        self._bitmask = np.empty((self._places[-1], words), np.int32)
        self._outcomes = [RowOutcome()] * len(jobs)
        self._answer = answer
        self._started = time.perf_counter()
        self._lock = threading.Lock()
        self._chunks = 1
        self._left = 1

    @property
    def rows(self) -> int:
        return self._places[-1]

    def split(self, chunks: int) -> None:
        self._chunks = self._left = chunks

    def run(self, chunk: int) -> None:
        for index in range(chunk, len(self._jobs), self._chunks):
            rows = self._bitmask[self._places[index] : self._places[index + 1]]
            self._outcomes[index] = fill_rows(self._jobs[index], rows)
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            elapsed = 1e3 * (time.perf_counter() - self._started)
            self._answer.set_result(FilledMasks(self._bitmask, tuple(self._outcomes), elapsed))


def _be_nice() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


def fill_rows(job: RowJob, rows: NDArray[np.int32]) -> RowOutcome:
    """The rows [1 + guesses, words] of one job, whatever happens."""
    outcome = fill_row(job, rows[0])
    if not job.guesses:
        return outcome
    rows[1:] = ALL_ALLOWED
    if job.state is None or outcome.error or outcome.stopped:
        return outcome
    return _fill_ahead(job, rows, outcome)


def _fill_ahead(job: RowJob, rows: NDArray[np.int32], outcome: RowOutcome) -> RowOutcome:
    """The rows behind the guesses, up to the first that is not allowed: what is sampled behind it never counts.

    What goes wrong there may never be met: it only ends the row. Each state is a copy, so that the one that turns
    out right goes on as if its tokens had come one by one.
    """
    assert job.state is not None
    state, ahead, useful, cut = job.state, [], ALL_USEFUL, False
    slowest, spent = outcome.elapsed_ms, 0.0
    for index, guess in enumerate(job.guesses):
        if not allows(rows[index], guess):
            break
        started = time.perf_counter()
        after = _state_after(state, guess, rows[index + 1], job.budget - index - 1) if spent < LATE_MS else None
        elapsed = 1e3 * (time.perf_counter() - started)
        slowest, spent = max(slowest, elapsed), spent + elapsed
        if after is None or after.is_stopped:
            rows[index + 1] = ALL_ALLOWED
            useful, cut = index + 1, after is None
            break
        state = after
        ahead.append(state)
    return replace(outcome, useful=useful, cut=cut, ahead=tuple(ahead), elapsed_ms=slowest)


def _state_after(state: ConstraintState, token: int, row: NDArray[np.int32], budget: int) -> ConstraintState | None:
    """A copy that has taken `token` and filled its mask; None where it breaks."""
    try:
        after = state.fork()
        if not after.advance((token,)):
            return None
        if not after.is_stopped:
            after.fill(row, budget)
    except Exception:  # the library's misuse errors, as in fill_row
        return None
    return None if after.error else after


def fill_row(job: RowJob, row: NDArray[np.int32]) -> RowOutcome:
    """One row, whatever happens: an error leaves it all ones."""
    started = time.perf_counter()
    state = job.state
    if state is None:
        row[:] = ALL_ALLOWED
        return RowOutcome()
    forced: tuple[int, ...] = ()
    try:
        error = "" if state.advance(job.accepted) else state.error or "the token is not allowed"
        stopped = not error and state.is_stopped
        if not error:
            forced = state.fill(row, job.budget)
            error = state.error
    except Exception as failure:  # the library's misuse errors: this row's request ends, the step goes on
        error, stopped = f"{type(failure).__name__}: {failure}", False
    if error:
        row[:] = ALL_ALLOWED
        forced, stopped = (), False
    return RowOutcome(forced, stopped, error, 1e3 * (time.perf_counter() - started))


def lead_row(state: ConstraintState, accepted: tuple[int, ...], budget: int) -> RowOutcome:
    """Take `accepted` and what must follow; unlike those of `fill_row` these forced tokens are the state's own now.

    Like `fill_row` it never raises. The time is the processor's: the loop's thread does it itself.
    """
    started = time.thread_time()
    forced: tuple[int, ...] = ()
    stopped = False
    try:
        error = "" if state.advance(accepted) else state.error or "the token is not allowed"
        if not error:
            forced = state.take_forced(budget)
            error, stopped = state.error, state.is_stopped
    except Exception as failure:  # as in fill_row: it concerns this request alone
        error = f"{type(failure).__name__}: {failure}"
    if error:
        forced, stopped = (), False
    return RowOutcome(forced, stopped, error, 1e3 * (time.thread_time() - started))


def judge_row(state: ConstraintState, accepted: tuple[int, ...]) -> RowOutcome:
    """The verdict on a text that has its last token; like `fill_row` it never raises."""
    try:
        if not state.advance(accepted):
            return RowOutcome(error=state.error or "the token is not allowed")
        return RowOutcome(stopped=state.is_stopped, complete=state.is_complete)
    except Exception as failure:  # as in fill_row: it concerns this request alone
        return RowOutcome(error=f"{type(failure).__name__}: {failure}")
