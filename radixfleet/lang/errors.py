"""What a program's author meets when something is wrong; failures of the model's server are backend.errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class LanguageError(RuntimeError):
    """A program asked for something that makes no sense."""


class UnsetVariable(LanguageError, KeyError):
    """A variable was read that the program never set."""

    def __str__(self) -> str:  # KeyError would show the message in quotes
        return str(self.args[0])


class ApiCallError(LanguageError):
    """An API called by `gen(api_url=...)` may not be called, or did not answer as it should."""


class BatchError(LanguageError):
    """Some items of a batch failed. `states` has every item, finished or not; `failures` the errors by index."""

    def __init__(self, states: list[Any], failures: Mapping[int, BaseException]) -> None:
        index, first = next(iter(failures.items()))
        super().__init__(
            f"{len(failures)} of {len(states)} items failed; item {index}: {type(first).__name__}: {first}"
        )
        self.states = states
        self.failures = dict(failures)
