"""Writes parsed EBNF as a Lark grammar for the engine.

The engine reads terminals greedily, like a lexer: as separate terminals, `[a-z]* "b"` would never match `ab`. So
everything that does not refer back to itself becomes one terminal, which is matched exactly:

    root ::= item ("," item)*        ->   start: T0          T0: T1 ("," T1)*      (no recursion: one terminal)
    expr ::= [0-9]+ | "(" expr ")"   ->   start: /[0-9]+/ | "(" start ")"          (recursion: terminals between)
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from services.scheduler.constraint.gbnf import (
    CharacterClass,
    Choice,
    Literal,
    Node,
    Reference,
    Repeat,
    Sequence,
)


def to_lark(rules: dict[str, Node]) -> str:
    """The Lark text of the rules that `root` reaches."""
    return _Writer(rules).text()


def recursive_rules(rules: dict[str, Node]) -> set[str]:
    """Names of the rules that reach a rule which reaches itself: they cannot be terminals."""
    uses = {name: set(_references(body)) for name, body in rules.items()}
    plain: set[str] = set()
    waiting = {name: len(used) for name, used in uses.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, used in uses.items():
        for other in used:
            users[other].append(name)
    ready = [name for name, count in waiting.items() if count == 0]
    while ready:
        name = ready.pop()
        plain.add(name)
        for user in users[name]:
            waiting[user] -= 1
            if waiting[user] == 0:
                ready.append(user)
    return rules.keys() - plain


class _Writer:
    def __init__(self, rules: dict[str, Node]) -> None:
        self._rules = rules
        self._recursive = recursive_rules(rules)
        reached = _reached(rules)
        self._names = {name: self._new_name(name, index) for index, name in enumerate(reached)}
        self._lines: list[str] = []
        self._runs = 0

    def text(self) -> str:
        if "root" not in self._recursive:
            self._lines.append(f"start: {self._names['root']}")
        for name, own in self._names.items():
            body = self._rules[name]
            text = self._rule(body) if name in self._recursive else self._terminal(body)
            self._lines.append(f"{own}: {text}")
        return "\n".join(self._lines) + "\n"

    def _new_name(self, name: str, index: int) -> str:
        if name not in self._recursive:
            return f"T{index}"
        return "start" if name == "root" else f"r{index}"

    def _terminal(self, node: Node) -> str:
        match node:
            case Literal():
                return json.dumps(node.text, ensure_ascii=False)
            case CharacterClass():
                return class_regex(node)
            case Reference():
                return self._names[node.name]
            case Sequence():
                return " ".join(self._terminal(part) for part in node.parts) or '""'
            case Choice():
                return "(" + " | ".join(self._terminal(option) for option in node.options) + ")"
            case Repeat():
                return f"({self._terminal(node.node)}){_counts(node)}"

    def _rule(self, node: Node) -> str:
        if not self._is_recursive(node):
            return self._run((node,))
        match node:
            case Reference():
                return self._names[node.name]
            case Sequence():
                return " ".join(self._sequence(node.parts))
            case Choice():
                return "(" + " | ".join(self._rule(option) for option in node.options) + ")"
            case Repeat():
                return f"({self._rule(node.node)}){_counts(node)}"
        raise AssertionError(node)

    def _sequence(self, parts: tuple[Node, ...]) -> Iterator[str]:
        run: list[Node] = []
        for part in parts:
            if not self._is_recursive(part):
                run.append(part)
                continue
            if run:
                yield self._run(tuple(run))
                run = []
            yield self._rule(part)
        if run:
            yield self._run(tuple(run))

    def _run(self, parts: tuple[Node, ...]) -> str:
        """Neighbours without recursion, as one terminal."""
        if len(parts) == 1 and isinstance(parts[0], Literal | Reference):
            return self._terminal(parts[0])
        self._runs += 1
        name = f"RUN{self._runs}"
        self._lines.append(f"{name}: {self._terminal(Sequence(parts))}")
        return name

    def _is_recursive(self, node: Node) -> bool:
        return any(name in self._recursive for name in _references(node))


def class_regex(node: CharacterClass) -> str:
    """A class as a regular expression between slashes."""
    inner = "".join(_code(first) if first == last else f"{_code(first)}-{_code(last)}" for first, last in node.ranges)
    return f"/[{'^' if node.negated else ''}{inner}]/"


def _code(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"


def _counts(node: Repeat) -> str:
    if node.most is None and node.least < 2:
        return "+" if node.least else "*"
    if (node.least, node.most) == (0, 1):
        return "?"
    return f"{{{node.least},{'' if node.most is None else node.most}}}"


def _references(node: Node) -> Iterator[str]:
    todo = [node]
    while todo:
        match todo.pop():
            case Reference(name):
                yield name
            case Sequence(parts) | Choice(parts):
                todo += parts
            case Repeat(inner):
                todo.append(inner)


def _reached(rules: dict[str, Node]) -> list[str]:
    found = dict.fromkeys(["root"])
    todo = ["root"]
    while todo:
        for name in _references(rules[todo.pop()]):
            if name not in found:
                found[name] = None
                todo.append(name)
    return list(found)
