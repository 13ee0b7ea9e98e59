"""Reads a grammar in EBNF of the GBNF family: `root ::= "a" rule* [0-9]{2,4} | ...`. Leaves writing it to others.

A rule ends where the next `name ::=` begins, so alternatives may stand on lines of their own. Comments run from
`#` to the end of the line.
"""

from __future__ import annotations

import re
from typing import TypeAlias

from msgspec import Struct

from services.scheduler.constraint.errors import BadSource, line_and_column
from services.scheduler.constraint.limits import Limits

_SPACE = re.compile(r"(?:\s|#[^\n]*)+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_DEFINES = re.compile(r"(?:\s|#[^\n]*)*::=")
_COUNTS = re.compile(r"\{\s*(\d*)\s*(,?)\s*(\d*)\s*\}")
_HEX = {"x": 2, "u": 4, "U": 8}
_PLAIN = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "b": "\b", "0": "\0"}
_SETS = {
    "d": [("0", "9")],
    "w": [("0", "9"), ("A", "Z"), ("_", "_"), ("a", "z")],
    "s": [("\t", "\r"), (" ", " ")],
}


class Literal(Struct, frozen=True):
    text: str


class CharacterClass(Struct, frozen=True):
    ranges: tuple[tuple[str, str], ...]
    negated: bool = False


class Reference(Struct, frozen=True):
    name: str
    offset: int


class Sequence(Struct, frozen=True):
    parts: tuple[Node, ...]


class Choice(Struct, frozen=True):
    options: tuple[Node, ...]


class Repeat(Struct, frozen=True):
    node: Node
    least: int
    most: int | None  # None: without end


Node: TypeAlias = Literal | CharacterClass | Reference | Sequence | Choice | Repeat

ANY_CHARACTER = CharacterClass((("\n", "\n"), ("\r", "\r")), negated=True)


def parse_gbnf(text: str, limits: Limits) -> dict[str, Node]:
    """Rules by name, `root` among them; every reference resolves. Raises BadSource with line and column."""
    return _Reader(text, limits).grammar()


class _Reader:
    def __init__(self, text: str, limits: Limits) -> None:
        self._text = text
        self._limits = limits
        self._offset = 0
        self._depth = 0
        self._references: list[Reference] = []

    def grammar(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        self._skip()
        while self._offset < len(self._text):
            start = self._offset
            name = self._name("a rule's name")
            if not self._defines():
                raise self._error("expected ::=")
            if name in rules:
                raise self._error(f"the rule {name} is defined twice", start)
            self._offset = self._definition_end()
            self._skip()
            rules[name] = self._rule_body(name)
        if "root" not in rules:
            raise BadSource("there is no rule named root")
        for reference in self._references:
            if reference.name not in rules:
                raise self._error(f"the rule {reference.name} is not defined", reference.offset)
        return rules

    def _rule_body(self, name: str) -> Node:
        start = self._offset
        body = self._choice()
        if body == Sequence(()):
            raise self._error(f"the rule {name} is empty", start)
        if self._peek() == ")":
            raise self._error("this parenthesis was never opened")
        return body

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._peek() == "|":
            self._offset += 1
            self._skip()
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        parts: list[Node] = []
        while (character := self._peek()) and character not in "|)" and not self._at_rule():
            parts.append(self._repeated(self._atom()))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _atom(self) -> Node:
        character = self._peek()
        if character == '"':
            return self._literal()
        if character == "[":
            return self._class()
        if character == "(":
            return self._group()
        if character == ".":
            self._offset += 1
            self._skip()
            return ANY_CHARACTER
        start = self._offset
        reference = Reference(self._name("a string, a [class], a group or a name"), start)
        self._references.append(reference)
        return reference

    def _group(self) -> Node:
        start = self._offset
        self._depth += 1
        if self._depth > self._limits.depth:
            raise self._error(f"nested deeper than {self._limits.depth} groups")
        self._offset += 1
        self._skip()
        body = self._choice()
        if self._peek() != ")":
            raise self._error("this parenthesis is never closed", start)
        self._offset += 1
        self._skip()
        self._depth -= 1
        return body

    def _repeated(self, node: Node) -> Node:
        character = self._peek()
        if character and character in "*+?":
            self._offset += 1
            node = Repeat(node, 1 if character == "+" else 0, 1 if character == "?" else None)
        elif character == "{":
            node = self._counted(node)
        else:
            return node
        self._skip()
        if (character := self._peek()) and character in "*+?{":
            raise self._error("a repeat cannot follow a repeat; use parentheses")
        return node

    def _counted(self, node: Node) -> Node:
        match = _COUNTS.match(self._text, self._offset)
        if match is None or not (match[1] or match[3]):
            raise self._error("expected {n}, {n,} or {n,m}")
        least = int(match[1] or 0)
        most = (int(match[3]) if match[3] else None) if match[2] else least
        if most is not None and most < least:
            raise self._error("the most is less than the least")
        self._offset = match.end()
        return Repeat(node, least, most)

    def _literal(self) -> Node:
        start = self._offset
        self._offset += 1
        characters = []
        while self._peek() != '"':
            if not self._peek() or self._peek() == "\n":
                raise self._error("this string is never closed", start)
            characters.append(self._character())
        self._offset += 1
        self._skip()
        return Literal("".join(characters))

    def _class(self) -> Node:
        start = self._offset
        self._offset += 1
        negated = self._peek() == "^"
        self._offset += negated
        ranges: list[tuple[str, str]] = []
        while self._peek() != "]":
            if not self._peek():
                raise self._error("this class is never closed", start)
            ranges += self._range()
        if not ranges:
            raise self._error("an empty class matches nothing", start)
        self._offset += 1
        self._skip()
        return CharacterClass(tuple(ranges), negated)

    def _range(self) -> list[tuple[str, str]]:
        start = self._offset
        if self._peek() == "\\" and (known := _SETS.get(self._text[start + 1 : start + 2])):
            self._offset += 2
            return known
        first = self._character()
        if self._peek() != "-" or self._text[self._offset + 1 : self._offset + 2] in ("]", ""):
            return [(first, first)]
        self._offset += 1
        last = self._character()
        if last < first:
            raise self._error("the range runs backwards", start)
        return [(first, last)]

    def _character(self) -> str:
        character = self._peek()
        self._offset += 1
        if character != "\\":
            return character
        escape = self._peek()
        digits = _HEX.get(escape)
        if digits is None:
            if not escape or (escape.isalnum() and escape not in _PLAIN):
                raise self._error(f"the escape \\{escape} is unknown", self._offset - 1)
            self._offset += 1
            return _PLAIN.get(escape, escape)
        code = self._text[self._offset + 1 : self._offset + 1 + digits]
        if len(code) < digits or not all(c in "0123456789abcdefABCDEF" for c in code) or int(code, 16) > 0x10FFFF:
            raise self._error(f"\\{escape} needs {digits} hexadecimal digits", self._offset - 1)
        self._offset += 1 + digits
        return chr(int(code, 16))

    def _name(self, expected: str) -> str:
        match = _NAME.match(self._text, self._offset)
        if match is None:
            raise self._error(f"expected {expected}")
        self._offset = match.end()
        self._skip()
        return match[0]

    def _defines(self) -> bool:
        return _DEFINES.match(self._text, self._offset) is not None

    def _definition_end(self) -> int:
        match = _DEFINES.match(self._text, self._offset)
        assert match is not None
        return match.end()

    def _at_rule(self) -> bool:
        match = _NAME.match(self._text, self._offset)
        return match is not None and _DEFINES.match(self._text, match.end()) is not None

    def _peek(self) -> str:
        return self._text[self._offset : self._offset + 1]

    def _skip(self) -> None:
        match = _SPACE.match(self._text, self._offset)
        if match:
            self._offset = match.end()

    def _error(self, reason: str, offset: int | None = None) -> BadSource:
        return BadSource(reason, line_and_column(self._text, self._offset if offset is None else offset))
