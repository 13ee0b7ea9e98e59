"""Runs a program's function without a model, to see what it would append.

Where the function looks inside a value that does not exist (symbols), nobody can know how it would go on, so the
trace stops there and the graph says so.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from radixfleet.backend.sampling import Sampling
from radixfleet.lang.graph import Graph, Kind, Node
from radixfleet.lang.ir import (
    ApiCall,
    Assign,
    Expr,
    Gen,
    Known,
    Reasoning,
    RoleBegin,
    RoleEnd,
    ScopeBegin,
    ScopeEnd,
    Select,
    items_of,
    values_in,
)
from radixfleet.lang.symbols import Symbol, TraceStopped
from radixfleet.lang.traced_forks import TracedForks

_LABEL = 60


def trace(
    function: Callable[..., Any],
    arguments: Mapping[str, Any],
    bindings: Mapping[str, Any],
    sampling: Sampling,
    *,
    merge: bool = True,
) -> Graph:
    """The graph of the function. Arguments it has beyond the given ones become symbols, bindings name gen()s.

    The function's own code runs, its generations and calls do not.
    """
    tracer = _Tracer(bindings, sampling, merge)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    given = {
        p.name: arguments.get(p.name, Symbol(p.name, "argument"))
        for p in parameters
        if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    if inspect.iscoroutinefunction(function):
        tracer.graph.stopped = "it is an async function"
        return tracer.graph
    try:
        function(TracedState(tracer), **given)
    except TraceStopped as stop:
        tracer.graph.stopped = str(stop)
    except Exception as error:
        tracer.graph.stopped = f"{type(error).__name__}: {error}"
    return tracer.graph


class _Tracer:
    """What all states of one trace share."""

    def __init__(self, bindings: Mapping[str, Any], sampling: Sampling, merge: bool) -> None:
        self.graph = Graph()
        self.bindings = bindings
        self.sampling = sampling
        self.merge = merge
        self.in_prefix = True
        self.node_of: dict[int, int] = {}  # by number of the expression

    def add(self, kind: Kind, label: str, name: str | None = None, **fields: Any) -> int:
        node = Node(len(self.graph.nodes), kind, _short(label), name, **fields)
        self.graph.nodes.append(node)
        return node.number

    def mention(self, argument: str) -> None:
        if argument not in self.graph.arguments:
            self.graph.arguments.append(argument)


class TracedState:
    """Looks like a ProgramState to the function that is traced."""

    def __init__(self, tracer: _Tracer, parent: TracedState | None = None, last: tuple[int, ...] = ()) -> None:
        self._tracer = tracer
        self._last = last
        self._setters: dict[str, int] = dict(parent._setters) if parent else {}
        self._main = parent is None

    def __iadd__(self, expression: Any) -> TracedState:
        for item in items_of(expression):
            self._note_prefix(item)
            if isinstance(item, str):
                self._constant(item, "constant")
            else:
                self._expression(item)
        return self

    def __getitem__(self, name: str) -> Symbol:
        if name not in self._setters:
            raise TraceStopped(f"it reads {name!r}, which was not set")
        symbol = Symbol(name)
        self._tracer.node_of[symbol.number] = self._setters[name]
        return symbol

    def __setitem__(self, name: str, value: Any) -> None:
        self += Assign(name, value)

    def __contains__(self, name: str) -> bool:
        return name in self._setters

    get_var = __getitem__
    set_var = __setitem__

    def text(self) -> Symbol:
        symbol = Symbol("text()")
        if self._last:
            self._tracer.node_of[symbol.number] = self._last[-1]
        return symbol

    def sync(self) -> None:
        """Nothing to wait for."""

    def error(self) -> None:
        """Nothing went wrong."""

    def messages(self) -> NoReturn:
        raise TraceStopped("it reads its messages")

    def get_meta_info(self, name: str) -> NoReturn:
        raise TraceStopped(f"it reads the meta info of {name!r}")

    def text_iter(self, var_name: str | None = None) -> NoReturn:
        raise TraceStopped("it reads its own stream")

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        self += ScopeBegin(name)
        yield
        self += ScopeEnd(name)

    @contextmanager
    def _turn(self, role: str) -> Iterator[None]:
        self += RoleBegin(role)
        yield
        self += RoleEnd(role)

    def system(self) -> Any:
        return self._turn("system")

    def user(self) -> Any:
        return self._turn("user")

    def assistant(self) -> Any:
        return self._turn("assistant")

    def fork(self, size: int = 1, position_ids_offset: Any = None) -> TracedForks:
        self._tracer.in_prefix = False
        at = self._tracer.add("fork", f"fork {size}", after=self._last)
        return TracedForks([TracedState(self._tracer, self, (at,)) for _ in range(size)], self)

    @contextmanager
    def copy(self) -> Iterator[TracedState]:
        yield self.fork(1)[0]

    def join(self, states: list[TracedState], mode: str) -> None:
        ends = tuple(number for state in states for number in state._last)
        texts = mode == "concate_and_append"
        at = self._tracer.add("join", mode, after=ends if texts else self._last, uses=() if texts else ends)
        for state in states:
            for name in state._setters:
                self._setters.setdefault(name, at)
        self._last = (at,)

    def _note_prefix(self, item: Any) -> None:
        tracer = self._tracer
        if not (self._main and tracer.in_prefix):
            return
        bound = isinstance(item, Gen) and item.name in tracer.bindings
        if bound and not isinstance(tracer.bindings[item.name], Symbol):
            tracer.graph.prefix.append(str(tracer.bindings[item.name]))
        elif isinstance(item, str | RoleBegin | RoleEnd):
            tracer.graph.prefix.append(item)
        else:
            tracer.in_prefix = False

    def _constant(self, text: str, kind: Kind) -> None:
        tracer = self._tracer
        before = tracer.graph.nodes[self._last[0]] if len(self._last) == 1 else None
        if tracer.merge and kind == "constant" and before is not None and before.kind == kind:
            before.label = _short(before.label + text)
            before.pieces += 1
            return
        self._last = (tracer.add(kind, text, after=self._last),)

    def _expression(self, item: Expr) -> None:
        tracer = self._tracer
        if isinstance(item, RoleBegin | RoleEnd):
            self._constant(f"<{item.role}>" if isinstance(item, RoleBegin) else f"</{item.role}>", "template")
        elif isinstance(item, Assign):
            self._setters[item.name or ""] = self._value_node(item)
        elif isinstance(item, ScopeBegin):
            return
        elif isinstance(item, ScopeEnd):
            if self._last:
                self._setters[item.name or ""] = self._last[-1]
        elif isinstance(item, Reasoning):
            self += item.body
            for name in [name for name in self._setters if not name.endswith("_reasoning_content")]:
                self._setters[f"{name}_reasoning_content"] = self._setters[name]
        elif isinstance(item, Known):
            self._mention(item)
        elif item.number in tracer.node_of:
            at = tracer.node_of[item.number]
            value = tracer.add("value", item.name or "value", item.name, after=self._last, uses=(at,), is_mention=True)
            self._last = (value,)
        else:
            self._last = (self._work(item),)

    def _mention(self, item: Known) -> None:
        tracer = self._tracer
        name = item.name or ""
        if item.origin == "argument":
            tracer.mention(name)
            self._last = (tracer.add("argument", name, name, after=self._last),)
        else:
            uses = (tracer.node_of[item.number],) if item.number in tracer.node_of else ()
            self._last = (tracer.add("value", name, name, after=self._last, uses=uses),)

    def _value_node(self, item: Assign) -> int:
        items = items_of(item.value) if isinstance(item.value, str | Expr) else []
        uses = tuple(
            self._tracer.node_of[i.number] for i in items if isinstance(i, Expr) and i.number in self._tracer.node_of
        )
        return self._tracer.add("value", item.name or "", item.name, uses=uses)

    def _work(self, item: Expr) -> int:
        """A node for what a model or a call has to do, with nodes for values it needs first."""
        tracer = self._tracer
        if item.name is not None and item.name in tracer.bindings:
            tracer.mention(item.name)
            at = tracer.add("argument", item.name, item.name, after=self._last)
        elif isinstance(item, Gen):
            repeatable = item.sampling.over(tracer.sampling).repeatable
            at = tracer.add("gen", item.name or "gen", item.name, after=self._last, repeatable=repeatable)
        elif isinstance(item, Select):
            count = len(item.options)
            at = tracer.add(
                "select", item.name or "select", item.name, after=self._last, repeatable=True, options=count
            )
        else:
            assert isinstance(item, ApiCall)
            uses = tuple(self._needed(value) for value in values_in(item))
            at = tracer.add("call", item.name or "call", item.name, after=self._last, uses=uses)
        tracer.node_of[item.number] = at
        if item.name is not None:
            self._setters[item.name] = at
        return at

    def _needed(self, value: Expr) -> int:
        if value.number in self._tracer.node_of:
            return self._tracer.node_of[value.number]
        if isinstance(value, Known):
            name = value.name or ""
            self._tracer.mention(name)
            return self._tracer.add("argument", name, name)
        return self._work(value)


def _short(text: str) -> str:
    return text if len(text) <= _LABEL else text[: _LABEL - 1] + "…"
