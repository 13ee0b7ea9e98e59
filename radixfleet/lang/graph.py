"""The graph of a program: what it appends, in which order, and what needs what.

    constant --> gen a --> constant --> call (uses a) --> gen b          --> text before
                    `---------------------^                              ^   value used

Made by tracer. Leaves words about it to explain and drawing to picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["constant", "argument", "value", "template", "gen", "select", "call", "fork", "join"]
WORK: tuple[Kind, ...] = ("gen", "select", "call")


@dataclass(eq=False)
class Node:
    """One thing appended to one state. `after`: what stands before it in the text; `uses`: values it needs."""

    number: int
    kind: Kind
    label: str
    name: str | None = None
    after: tuple[int, ...] = ()
    uses: tuple[int, ...] = ()
    pieces: int = 1  # constants that became this one
    repeatable: bool = False  # asking twice gives the same answer
    options: int = 0  # of a select
    is_mention: bool = False  # a value that is repeated where it stands, without the program's reading it


@dataclass(eq=False)
class Graph:
    """Nodes in the order in which the program made them; `stopped` says why the trace ended early, if it did."""

    nodes: list[Node] = field(default_factory=list)
    prefix: list[Any] = field(default_factory=list)  # expressions before the first thing that is not constant
    arguments: list[str] = field(default_factory=list)  # in the order in which they are mentioned
    stopped: str | None = None

    def of_kind(self, *kinds: Kind) -> list[Node]:
        return [node for node in self.nodes if node.kind in kinds]

    @property
    def prefix_text(self) -> str:
        """Constant text every run starts with, without a template's words."""
        return "".join(item for item in self.prefix if isinstance(item, str))

    def levels(self) -> list[list[Node]]:
        """Work that can be done at the same time, level by level: each needs something of the level before."""
        depth: dict[int, int] = {}
        levels: dict[int, list[Node]] = {}
        for node in self.nodes:
            needs = node.uses if node.kind == "call" else (*node.after, *node.uses)
            own = max((depth[other] for other in needs), default=0) + (node.kind in WORK)
            depth[node.number] = own
            if node.kind in WORK:
                levels.setdefault(own, []).append(node)
        return [levels[level] for level in sorted(levels)]

    def chains(self) -> list[list[Node]]:
        """Generations and selects that need nothing but text between one and the next."""
        chains: dict[int, list[Node]] = {}  # by the last node of each
        for node in self.of_kind("gen", "select"):
            before = self.nodes[node.after[0]] if len(node.after) == 1 else None
            while before is not None and (before.kind in ("constant", "template", "argument") or before.is_mention):
                before = self.nodes[before.after[0]] if len(before.after) == 1 else None
            chain = chains.pop(before.number, []) if before is not None else []
            chains[node.number] = [*chain, node]
        return list(chains.values())

    def edges(self) -> Iterator[tuple[int, int, bool]]:
        """(from, to, whether it is a value rather than text)."""
        for node in self.nodes:
            for other in node.after:
                yield other, node.number, False
            for other in node.uses:
                if other not in node.after:
                    yield other, node.number, True

    def calls_with_text_before(self) -> list[Node]:
        """Calls during which the constant before them can be computed, because a generation follows."""
        found = []
        for call in self.of_kind("call"):
            before = [self.nodes[number] for number in call.after]
            more = any(node.kind in ("gen", "select") for node in self.nodes[call.number + 1 :])
            if more and any(node.kind in ("constant", "template") for node in before):
                found.append(call)
        return found
