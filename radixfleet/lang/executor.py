"""Evaluates what was appended to one state, in order, on a thread that lives only while there is something to do.

    author's thread    s += a    s += b         s["x"] (waits)     s += c
    executor's thread  |-- a --|-- b --|                           |-- c --|

Holds the state's variables and its error. Leaves single expressions to evaluate.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from radixfleet.lang.errors import LanguageError, UnsetVariable
from radixfleet.lang.evaluate import evaluate
from radixfleet.lang.feed import Feed
from radixfleet.lang.guess import Guess
from radixfleet.lang.ir import items_of, names_set_by
from radixfleet.lang.log import Chunk, Log
from radixfleet.lang.run import Run
from radixfleet.lang.transcript import Transcript
from radixfleet.lang.values import PendingCall, start_calls

LOOK_AHEAD_S = 0.05  # what an author may take to append the next step of a chain before it is done without that


@dataclass(frozen=True)
class Variable:
    """A value with what the backend told about it."""

    value: Any
    meta: dict[str, Any] = field(default_factory=dict)


class Executor:
    """One state's queue, transcript and variables. `error` is the first failure; nothing is evaluated after it."""

    def __init__(self, run: Run, parent: Executor | None = None) -> None:
        self.run = run
        self.log = Log(run.changed)
        self.transcript: Transcript = parent.transcript.copy() if parent else Transcript()
        self.variables: dict[str, Variable] = dict(parent.variables) if parent else {}
        self.values: dict[int, str] = dict(parent.values) if parent else {}  # by number of the expression
        self.calls: dict[int, PendingCall] = dict(parent.calls) if parent else {}
        self.scopes: list[tuple[str, int]] = list(parent.scopes) if parent else []
        self.error: BaseException | None = None
        self.error_seen = False
        self.helpers: set[int] = set()  # threads at work for this state
        self.following: list[Any] = []  # what comes after the expression at hand in the one that was appended
        self.feed: Feed | Guess | None = None  # answers that come ahead of their expressions
        self._queue: deque[list[Any]] = deque()
        self._coming: Counter[str] = Counter()
        self._first = parent is None
        self._active = False
        self._thread: threading.Thread | None = None  # the last one, so that its end can be waited for
        run.add(self)

    def submit(self, expression: Any) -> None:
        """Evaluate later (or now, where the run is inline). Raises the state's error if there is one."""
        items = items_of(expression)
        with self.run.changed:
            self._raise_error()
        if not self.run.cancelled:
            start_calls(self, items)
        with self.run.changed:
            self._coming.update(names_set_by(items))
            if self.run.cancelled:
                return
            self._queue.append(items)
            self.run.asked = False
            if not self.run.inline and not self._active:
                self._active = True
                self._thread = threading.Thread(target=self._drain, name="radixfleet-program", daemon=True)
                self._thread.start()
        if self.run.inline:
            self._evaluate_next()
            with self.run.changed:
                self._raise_error()

    def evaluate(self, items: list[Any]) -> None:
        """Evaluate now."""
        evaluate(self, items)

    def queued(self) -> list[Any]:
        """What waits for its turn."""
        with self.run.changed:
            return [item for items in self._queue for item in items]

    def ahead(self, *, wait: bool = True) -> list[Any]:
        """What comes after the expression at hand, so far.

        `wait`: first give the author the time to append more, until he waits for something himself.
        """
        if wait and not self.run.inline:
            with self.run.changed:
                self.run.changed.wait_for(lambda: self.run.asked or self.run.cancelled, LOOK_AHEAD_S)
        return [*self.following, *self.queued()]

    def read(self, name: str) -> Variable:
        """Wait for a variable. Raises UnsetVariable, or the error that keeps it from being set."""
        self._refuse_own_thread()
        with self.run.changed:
            if not self._readable(name):
                self.run.ask()
            while not self._readable(name):
                self.run.changed.wait()
            return self.variables[name]

    async def read_async(self, name: str) -> Variable:
        with self.run.changed:
            if not self._readable(name):
                self.run.ask()
        await self.log.wait_async(lambda: self._readable(name))
        return self.variables[name]

    def has(self, name: str) -> bool:
        """Whether a variable is set or will be by what was submitted."""
        with self.run.changed:
            return name in self.variables or self._coming[name] > 0

    def wait(self, timeout: float | None = None) -> None:
        """Until nothing is queued and no thread is left, or the seconds are over."""
        self._refuse_own_thread()
        self.run.ask()
        while True:
            with self.run.changed:  # an interrupted join() would take a living thread for a dead one
                if not self.run.changed.wait_for(lambda: not self._active, timeout):
                    return
                thread = self._thread
            if thread is not None:
                thread.join(timeout)
            with self.run.changed:
                if not self._active or timeout is not None:
                    return

    def settle(self) -> None:
        """Wait as `look` does, and raise the state's error if there is one."""
        self.look()
        with self.run.changed:
            self._raise_error()

    def look(self) -> None:
        """Wait for everything that was appended; whoever watches a stream from outside waits for its end."""
        self.wait()
        if self.run.stream and self._first:
            with self.run.changed:
                self.run.changed.wait_for(lambda: self.run.author in (None, threading.get_ident()))

    def fork(self) -> Executor:
        """A state that goes on from here on its own."""
        self.settle()
        return Executor(self.run, self)

    def aside(self) -> Executor:
        """A copy as it is right now, for a value that is needed before its place in the text."""
        return Executor(self.run, self)

    def set(self, name: str | None, value: Any, meta: dict[str, Any] | None = None) -> None:
        if name is None:
            return
        with self.run.changed:
            self.variables[name] = Variable(value, meta or {})
            if self._coming[name] > 0:
                self._coming[name] -= 1
        self.log.wake()

    def say(self, text: str, name: str | None = None, meta: dict[str, Any] | None = None) -> None:
        """Text for those who watch."""
        if text or meta:
            self.log.append(Chunk(text, name, meta or {}))

    def ask_as_author(self) -> None:
        """A stream is read; by the program itself, which appends nothing meanwhile, or by somebody else."""
        if self.run.author == threading.get_ident():
            self.run.ask()

    def ended(self, name: str | None) -> Callable[[], bool]:
        """For Log.follow: whether no more text comes (for a variable). Raises what went wrong."""

        def over() -> bool:
            if name is not None:
                return self._readable(name)
            if self._running():
                return False
            self._raise_error()
            return True

        return over

    def fail(self, error: BaseException) -> None:
        with self.run.changed:
            if self.error is None:
                self.error = error
        self.log.wake()

    def _readable(self, name: str) -> bool:
        """Under the condition: whether the variable can be read now. Raises if it never will be."""
        if name in self.variables and self._coming[name] <= 0:
            return True
        self._raise_error()
        if self.run.cancelled:
            raise LanguageError("the program was cancelled")
        if self._running():
            return False
        known = ", ".join(sorted(self.variables)) or "none"
        raise UnsetVariable(f"the program never set {name!r}; its variables: {known}")

    def _running(self) -> bool:
        """Whether more may come without the caller's doing."""
        elsewhere = self.run.stream and self.run.author not in (None, threading.get_ident())
        return self._active or elsewhere

    def _raise_error(self) -> None:
        if self.error is not None:
            self.error_seen = True
            raise self.error

    def _refuse_own_thread(self) -> None:
        own = self._active and self._thread is threading.current_thread()
        if own or threading.get_ident() in self.helpers:
            raise LanguageError(
                "a function called by the program waits for the program itself; give it values as params"
            )

    def _drain(self) -> None:
        while True:
            with self.run.changed:
                left = self.error is not None or self.run.cancelled
                if not left and not self._queue:
                    self._active = False
                    break
            if left:
                self._leave()
                break
            self._evaluate_next()
        self.log.wake()

    def _leave(self) -> None:
        """Nothing more is evaluated; nobody waits for answers that this state would have brought."""
        try:
            self.drop_feed()
        finally:
            with self.run.changed:
                self._queue.clear()
                self._active = False

    def drop_feed(self) -> None:
        """Ask for no more answers ahead."""
        feed, self.feed = self.feed, None
        if feed is not None:
            feed.close()

    def _evaluate_next(self) -> None:
        with self.run.changed:
            items = self._queue.popleft()
        try:
            self.evaluate(items)
        except BaseException as error:  # whoever reads next raises it; nothing may wait for ever
            self.drop_feed()
            self.fail(error)
