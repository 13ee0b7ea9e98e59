"""Identical work of a batch, done once: whoever asks first does it, the others get its result.

Only repeatable work may be shared; who decides that is run. A failure is never shared: everyone tries alone then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from itertools import groupby
from typing import Any, TypeVar, cast

from radixfleet.backend.base import IdsPart, Prompt, TextPart
from radixfleet.backend.errors import BackendError

T = TypeVar("T")


class SharedWork:
    """Thread-safe. `reused` counts results that were not computed again."""

    def __init__(self) -> None:
        self._results: dict[Hashable, Future[Any]] = {}
        self._lock = threading.Lock()
        self.reused = 0

    def once(self, key: Hashable, work: Callable[[], T]) -> T:
        with self._lock:
            known = self._results.get(key)
            if known is None:
                mine: Future[T] = Future()
                self._results[key] = mine
        if known is None:
            return self._do(key, mine, work)
        if known.exception() is not None:
            return work()
        with self._lock:
            self.reused += 1
        return cast(T, known.result())

    def claim(self, keys: Sequence[Hashable]) -> list[tuple[Future[Any], bool]]:
        """For each key its future, and whether it is the caller's to fulfil; keys go from first to last step.

        Once one is the caller's all later ones are, too.
        """
        claimed: list[tuple[Future[Any], bool]] = []
        is_ours = False
        with self._lock:
            for key in keys:
                known = self._results.get(key)
                is_ours = is_ours or known is None
                future: Future[Any] = known if known is not None and not is_ours else Future()
                if known is None:
                    self._results[key] = future
                claimed.append((future, is_ours))
        return claimed

    def withdraw(self, key: Hashable, future: Future[Any]) -> None:
        """What was claimed does not come: whoever waits for it has to do without."""
        with self._lock:
            if self._results.get(key) is future:
                del self._results[key]
        if not future.done():
            future.set_exception(BackendError("the work was given up by the item that did it"))

    def count_reuse(self) -> None:
        with self._lock:
            self.reused += 1

    def _do(self, key: Hashable, mine: Future[T], work: Callable[[], T]) -> T:
        try:
            result = work()
        except BaseException as error:
            with self._lock:
                self._results.pop(key, None)
            mine.set_exception(error)
            raise
        mine.set_result(result)
        return result


def prompt_key(prompt: Prompt) -> Hashable:
    """Equal for prompts that are the same to the model, however their constants were put together."""
    runs: list[Hashable] = [prompt.templated, prompt.messages, prompt.open_role]
    for kind, group in groupby(prompt.parts, lambda part: isinstance(part, TextPart) and part.literal):
        for is_text, run in groupby(group, lambda part: isinstance(part, TextPart)):
            if is_text:
                runs.append((kind, "".join(part.text for part in run)))
            else:
                runs += [part.ids for part in run if isinstance(part, IdsPart)]
    return tuple(runs)
