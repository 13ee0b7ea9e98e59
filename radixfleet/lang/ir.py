"""Expressions of the language: what a program appends to its state. They say what to do and do nothing themselves.

    s += "Q: " + question + "\\nA:" + gen("answer", stop="\\n")      Sequence("Q: ...", Gen)

An expression inside an f-string leaves a mark there (marks), so its value can be used before it exists.
Leaves evaluation to executor, and drawing graphs of them to tracer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from radixfleet.backend.sampling import Sampling
from radixfleet.lang import marks
from radixfleet.lang.choices import ChoicesMethod

# What the types of gen(dtype=...) look like.
REGEX_INT = r"[-+]?[0-9]+[ \n]*"
REGEX_FLOAT = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r'"[\w\d ]*"'  # of all blanks only the space may stand in a JSON string

_numbers = itertools.count(1)
E = TypeVar("E", bound="Expr")


class Expr:
    """Anything but plain text. Identity counts: the same object used twice is one value."""

    name: str | None = None

    def __init__(self) -> None:
        self.number = next(_numbers)

    def __add__(self, other: Any) -> Sequence:
        return Sequence([self, other])

    def __radd__(self, other: Any) -> Sequence:
        return Sequence([other, self])

    def __str__(self) -> str:
        return marks.mark(self)

    def __format__(self, spec: str) -> str:
        if spec:
            raise TypeError(f"{self!r} has no value yet, so it cannot be formatted with {spec!r}")
        return marks.mark(self)

    def __bool__(self) -> bool:
        raise TypeError(f"{self!r} has no value yet; append it to the state and read state[{self.name!r}]")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str | int | float):
            raise TypeError(f"{self!r} has no value yet; append it to the state and read state[{self.name!r}]")
        return self is other

    __hash__ = object.__hash__

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"{self!r} has no value yet; append it to the state and read state[{self.name!r}]")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})" if self.name else f"{type(self).__name__}()"


class Sequence(Expr):
    """Expressions and texts, one after another. Sequences inside are flattened."""

    def __init__(self, items: list[Any]) -> None:
        super().__init__()
        self.items: tuple[Any, ...] = tuple(_flat(items))

    def __repr__(self) -> str:
        return " + ".join(repr(item) for item in self.items)


class Gen(Expr):
    """Text the model writes. `wrapped` is text a dtype puts around the value, such as quotes."""

    def __init__(self, name: str | None, sampling: Sampling) -> None:
        super().__init__()
        self.name = name
        self.sampling = sampling


class Select(Expr):
    """The option that the model finds likeliest."""

    def __init__(self, name: str | None, options: list[str], method: ChoicesMethod) -> None:
        super().__init__()
        self.name = name
        self.options = tuple(options)
        self.method = method


class ApiCall(Expr):
    """Text from an HTTP API or from a Python function, with the program's values as parameters."""

    def __init__(
        self,
        name: str | None,
        target: str | Callable[..., Any],
        params: Mapping[str, Any],
        headers: Mapping[str, str],
        max_tokens: int | None,
        timeout: float | None,
        max_bytes: int | None,
    ) -> None:
        super().__init__()
        self.name = name
        self.target = target
        self.params = dict(params)
        self.headers = dict(headers)
        self.max_tokens = max_tokens
        self.timeout = timeout
        self.max_bytes = max_bytes


class RoleBegin(Expr):
    """A turn of a conversation starts. `spoken`: its text is known, so nothing is generated in it."""

    def __init__(self, role: str, spoken: bool = False) -> None:
        super().__init__()
        self.name = role
        self.role = role
        self.spoken = spoken


class RoleEnd(Expr):
    def __init__(self, role: str) -> None:
        super().__init__()
        self.name = role
        self.role = role


class ScopeBegin(Expr):
    """All text until the matching ScopeEnd becomes the variable."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class ScopeEnd(Expr):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Reasoning(Expr):
    """Splits what the model generates inside into thoughts and answer."""

    def __init__(self, body: Any, model_type: str) -> None:
        super().__init__()
        self.body = body
        self.model_type = model_type


class Known(Expr):
    """A variable of another state, or an argument of a traced program: something with a name and a later value."""

    def __init__(self, name: str, origin: str = "variable") -> None:
        super().__init__()
        self.name = name
        self.origin = origin


class Assign(Expr):
    """`state[name] = value`."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__()
        self.name = name
        self.value = value


def items_of(expression: Any) -> list[Any]:
    """Texts and expressions in order, with the marks in texts replaced by what they stand for."""
    found: list[Any] = []
    for item in _flat([expression]):
        found += marks.split(item) if isinstance(item, str) else [item]
    return [item for item in found if not isinstance(item, str) or item]


def names_set_by(expression: Any) -> list[str]:
    """Variables that exist once the expression was evaluated."""
    names: list[str] = []
    for item in items_of(expression):
        if isinstance(item, Reasoning):
            inner = names_set_by(item.body)
            # set once as generated and once more when split: readers wait for the second time
            names += [*inner, *inner, *(f"{name}_reasoning_content" for name in inner)]
        elif isinstance(item, Gen | Select | ApiCall | ScopeEnd | Assign) and item.name:
            names.append(item.name)
    return names


def values_in(call: ApiCall) -> list[Expr]:
    """Expressions that a call's target, parameters and headers are made from."""
    return list(expressions_in([call.target, *call.params.values(), *call.headers.values()]))


def expressions_in(value: Any) -> Iterator[Expr]:
    """Expressions that a value is or mentions, in lists and mappings too."""
    if isinstance(value, str | Expr):
        yield from (item for item in items_of(value) if isinstance(item, Expr))
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from expressions_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from expressions_in(inner)


def is_spoken(expression: Any) -> bool:
    """Whether the text is known without a model."""
    return not any(isinstance(item, Gen | Select | Reasoning) for item in items_of(expression))


def _flat(items: list[Any]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, Sequence):
            yield from item.items
        elif isinstance(item, Expr | str):
            yield item
        elif isinstance(item, list | tuple):
            yield from _flat(list(item))
        elif callable(item):
            raise TypeError(f"{item!r} is no text; call it, and append what it gives")
        else:
            yield str(item)
