"""One run of a program: what its state, its forks and its requests have in common.

One condition serves them all, so a single wait sees values, ends and errors. Leaves expressions to executor.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from radixfleet.backend.base import Answer, Backend, Prompt
from radixfleet.backend.errors import BackendError
from radixfleet.backend.sampling import Sampling
from radixfleet.lang.optimizations import Optimizations
from radixfleet.lang.shared_work import SharedWork, prompt_key

if TYPE_CHECKING:
    from radixfleet.lang.executor import Executor

T = TypeVar("T")
_CANCEL_GRACE_S = 5.0


@dataclass(eq=False)
class Run:
    """`author` is the thread in which the program's function runs, while it does."""

    backend: Backend
    sampling: Sampling
    stream: bool = False
    inline: bool = False  # evaluate in the author's thread
    options: Optimizations = field(default_factory=Optimizations)
    bindings: Mapping[str, Any] = field(default_factory=dict)
    guess_tokens: int = 0  # of a call that may answer several generations, on APIs without scripts
    shared: SharedWork = field(default_factory=SharedWork)

    def __post_init__(self) -> None:
        self.changed = threading.Condition()
        self.author: int | None = None
        self.cancelled = False
        self.asked = False  # the author waits for something: nothing more is appended before it is there
        self.used_bindings: set[str] = set()
        self._executors: list[Executor] = []
        self._tags: set[str] = set()

    def add(self, executor: Executor) -> None:
        with self.changed:
            self._executors.append(executor)

    def generate(self, prompt: Prompt, sampling: Sampling) -> Answer:
        """One generation; an identical repeatable one of the batch is not asked for twice."""

        def ask() -> Answer:
            with self.tagged() as tag:
                return self.backend.generate(prompt, sampling, tag)

        return self.share(prompt, sampling, ask) if sampling.repeatable else ask()

    def prefill(self, prompt: Prompt) -> None:
        """Compute and cache a prompt ahead; the same one of a batch only once."""
        self.share(prompt, "prefill", lambda: self.backend.prefill(prompt))

    def share(self, prompt: Prompt, what: Hashable, work: Callable[[], T]) -> T:
        """The result of repeatable work after this prompt."""
        if not self.options.share:
            return work()
        return self.shared.once((prompt_key(prompt), what), work)

    def stream_answers(self, prompt: Prompt, sampling: Sampling) -> Iterator[Answer]:
        with self.tagged() as tag:
            yield from self.backend.stream(prompt, sampling, tag)

    def ask(self) -> None:
        """The author waits: whoever hopes for more to be appended need not any longer."""
        with self.changed:
            self.asked = True
            self.changed.notify_all()

    def wait(self) -> None:
        """Until everything submitted was evaluated. Forks may start forks, hence the loop."""
        at = 0
        while at < len(self._executors):
            self._executors[at].wait()
            at += 1

    def unseen_error(self) -> BaseException | None:
        """The first error that no read has raised yet."""
        for executor in self._executors:
            if executor.error is not None and not executor.error_seen:
                executor.error_seen = True
                return executor.error
        return None

    def cancel(self, *, wait: bool = True) -> None:
        """Start nothing more, end what the server is doing, and (`wait`) give the threads a moment to notice."""
        with self.changed:
            self.cancelled = True
            tags = list(self._tags)
            self.changed.notify_all()
        for tag in tags:
            self._abort(tag)
        for executor in list(self._executors) if wait else ():
            executor.wait(_CANCEL_GRACE_S)

    def _abort(self, tag: str) -> None:
        try:
            self.backend.abort(tag)
        except BackendError:
            return  # a server that is gone has ended the request, too

    @contextmanager
    def tagged(self) -> Iterator[str]:
        """A name for one request, by which `cancel` ends it."""
        tag = uuid.uuid4().hex
        with self.changed:
            if self.cancelled:
                raise BackendError("the program was cancelled")
            self._tags.add(tag)
        try:
            yield tag
        finally:
            with self.changed:
                self._tags.discard(tag)
