"""Finds chains: generations with nothing between them that needs this process, so that one request can run them all.

    gen a | text | text | select b | role | gen c | call of an API
    `------------- one script -------------------'  the rest waits for its turn

Expressions are still evaluated one by one; the script only has their answers ready. Leaves asking for it to feed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from radixfleet.backend.base import AgainStep, GenStep, SelectStep, Step, TextPart
from radixfleet.lang import roles
from radixfleet.lang.choices import server_name
from radixfleet.lang.ir import (
    ApiCall,
    Assign,
    Expr,
    Gen,
    Reasoning,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    items_of,
)

if TYPE_CHECKING:
    from radixfleet.lang.executor import Executor

MOST_WORK = 64
MOST_STEPS = 256
MOST_OPTIONS = 256


@dataclass
class Chain:
    """Steps, and the expressions of those that the model works for, in the same order."""

    steps: list[Step] = field(default_factory=list)
    work: list[Expr] = field(default_factory=list)

    @property
    def worth(self) -> bool:
        """Whether it saves a request: a select alone would have to be tokenised first."""
        return len(self.work) > 1 or any(isinstance(item, Select) for item in self.work)


def find(state: Executor, items: Sequence[Any]) -> tuple[Chain, bool]:
    """The longest chain that `items` begin with, as the state is now; whether it might go on behind them.

    May ask for the chat template.
    """
    finder = _Finder(state)
    is_open = all(finder.add(item) for item in items)
    return finder.chain, is_open


class _Finder:
    """Walks ahead over what the executor will do, without doing it."""

    def __init__(self, state: Executor) -> None:
        self.chain = Chain()
        self._run = state.run
        self._values: Mapping[int, str] = state.values
        self._number_of: dict[int, int] = {}  # of work by expression
        self._waiting: list[Step] = []  # text that belongs to the chain only if work follows
        self._roles = list(state.transcript.roles)
        self._open_role = state.transcript.open_role

    @property
    def _literal(self) -> bool:
        return self._open_role is not None

    def add(self, item: Any) -> bool:
        """False where the chain ends before the item."""
        if isinstance(item, str):
            return self._text(item)
        if isinstance(item, Gen | Select | ApiCall) and (known := self._known(item)) is not None:
            return self._text(known)
        match item:
            case Gen() | Select():
                return self._work(item)
            case RoleBegin() | RoleEnd():
                return self._turn(item)
            case ScopeBegin() | ScopeEnd():
                return True
            case Assign():
                return self._has_values(item.value)
            case Reasoning():
                return all(self.add(inner) for inner in items_of(item.body))
            case _:
                return False

    def _known(self, item: Expr) -> str | None:
        if item.number in self._values:
            return self._values[item.number]
        if item.name is None or item.name not in self._run.bindings:
            return None
        return str(self._run.bindings[item.name])

    def _text(self, text: str) -> bool:
        if text:
            self._waiting.append(TextPart(text, self._literal))
        return True

    def _work(self, item: Gen | Select) -> bool:
        number = self._number_of.get(item.number)
        if number is not None:
            self._waiting.append(AgainStep(number, self._literal))
            return True
        step = self._gen_step(item) if isinstance(item, Gen) else self._select_step(item)
        if step is None or len(self.chain.work) == MOST_WORK:
            return False
        if len(self.chain.steps) + len(self._waiting) >= MOST_STEPS:
            return False
        self.chain.steps += [*self._waiting, step]
        self._waiting.clear()
        self._number_of[item.number] = len(self.chain.work)
        self.chain.work.append(item)
        return True

    def _gen_step(self, gen: Gen) -> GenStep | None:
        sampling = gen.sampling.over(self._run.sampling)
        return GenStep(sampling) if sampling.n in (None, 1) else None

    def _select_step(self, select: Select) -> SelectStep | None:
        method = server_name(select.method)
        if method is None or not self._run.options.select or len(select.options) > MOST_OPTIONS:
            return None
        if any(isinstance(item, Expr) for option in select.options for item in items_of(option)):
            return None
        return SelectStep(tuple(dict.fromkeys(select.options)), method, self._literal)

    def _turn(self, item: RoleBegin | RoleEnd) -> bool:
        """The template's text; where turns do not fit each other, evaluation tells so when it comes there."""
        if isinstance(item, RoleBegin):
            if self._open_role is not None:
                return False
            text = roles.begin_text(self._run.backend, self._roles, item.role, spoken=item.spoken)
            self._roles.append(item.role)
            self._open_role = item.role
        else:
            if self._open_role != item.role:
                return False
            text = roles.end_text(self._run.backend, self._roles)
            self._open_role = None
        if text:
            self._waiting.append(TextPart(text))
        return True

    def _has_values(self, value: Any) -> bool:
        """Whether an assigned value needs nothing that is not there when it is its turn."""
        items = items_of(value) if isinstance(value, str | Expr) else []
        return all(
            not isinstance(item, Expr) or item.number in self._values or item.number in self._number_of
            for item in items
        )
