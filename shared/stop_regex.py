"""Stop patterns as position automata: what a regular expression may follow with, in linear time and bounded size.

The automaton of Glushkov (1961): one position per character of the pattern, no empty moves. The standard library's
own parser reads the pattern; nothing here backtracks. Both the door, which refuses what cannot be bounded, and the
detokenizer, which runs it over text that comes in pieces, use this. Leaves running it to the detokenizer.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

MAX_CHARS = 1024
MAX_PATTERNS = 16
MAX_POSITIONS = 128  # of all patterns of a request together: the most that one character has to be compared with
MAX_EDGES = 512  # likewise: the most moves that one character can cost
KNOWN_CHARS = 512  # whose answers a class of characters remembers
ACCEPT = -1

Test = Callable[[str], bool]


class BadPattern(ValueError):
    """The pattern is not valid, or cannot be searched for in bounded time."""


@dataclass(frozen=True, slots=True)
class Program:
    """`tests[p]` says whether position p takes a character; `follow[p]` are the positions after it, ACCEPT the end."""

    pattern: str
    tests: tuple[Test, ...]
    follow: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]
    at_end: bool = False  # it ended in `$`: a match counts only where a token ends


def check_patterns(patterns: Sequence[str]) -> None:
    """Raises BadPattern, whose text begins with the pattern at fault."""
    positions = edges = 0
    for pattern in patterns:
        try:
            program = compile_pattern(pattern)
            positions += len(program.tests)
            edges += sum(map(len, program.follow))
            if positions > MAX_POSITIONS or edges > MAX_EDGES:
                raise BadPattern(f"is too large together with those before it: more than {MAX_POSITIONS} positions")
        except BadPattern as error:
            raise BadPattern(f"{pattern[:64]!r} {error}") from None


@lru_cache(maxsize=256)
def compile_pattern(pattern: str) -> Program:
    """Raises BadPattern with the reason."""
    if len(pattern) > MAX_CHARS:
        raise BadPattern(f"has {len(pattern)} characters; at most {MAX_CHARS} are allowed")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = _parser.parse(pattern)
        builder = _Builder()
        items, flags = list(tree), tree.state.flags
        at_end = bool(items) and (str(items[-1][0]), str(items[-1][1])) in _ENDS and not flags & re.MULTILINE
        whole = builder.sequence(items[:-1] if at_end else items, flags)
    except (re.error, OverflowError) as error:
        raise BadPattern(f"is not a valid regular expression: {error}") from None
    except RecursionError:
        raise BadPattern("is nested too deeply") from None
    if whole.nullable:
        raise BadPattern("matches the empty text")
    follow = [tuple(after) for after in builder.follow]
    for position in whole.last:
        follow[position] = (*follow[position], ACCEPT)
    return Program(pattern, tuple(builder.tests), tuple(follow), whole.first, at_end)


_ENDS = frozenset((("AT", "AT_END"), ("AT", "AT_END_STRING")))
_parser: Any = importlib.import_module("re._parser")  # no public name since Python 3.11


class _Part(NamedTuple):
    """Which positions a part of the pattern begins and ends with, and whether it may be empty."""

    nullable: bool
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()


_EMPTY = _Part(True)


class _Builder:
    def __init__(self) -> None:
        self.tests: list[Test] = []
        self.follow: list[dict[int, None]] = []
        self._edges = 0

    def sequence(self, items: Any, flags: int) -> _Part:
        whole = _EMPTY
        for kind, value in items:
            whole = self._join(whole, self._item(str(kind), value, flags))
        return whole

    def _item(self, kind: str, value: Any, flags: int) -> _Part:
        match kind:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return self._position(_test(kind, value, flags))
            case "BRANCH":
                return _either(self.sequence(branch, flags) for branch in value[1])
            case "SUBPATTERN":
                _, added, removed, inner = value
                return self.sequence(inner, (flags | added) & ~removed)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, inner = value
                return self._repeat(inner, int(least), None if most == _parser.MAXREPEAT else int(most), flags)
        names = {"AT": "anchors and word boundaries", "GROUPREF": "back-references"}
        raise BadPattern(f"cannot be searched for in a stream: {names.get(kind, 'look-around')} are not supported")

    def _position(self, test: Test) -> _Part:
        if len(self.tests) >= MAX_POSITIONS:
            raise BadPattern(f"is too large: more than {MAX_POSITIONS} positions")
        self.tests.append(test)
        self.follow.append({})
        only = (len(self.tests) - 1,)
        return _Part(False, only, only)

    def _repeat(self, inner: Any, least: int, most: int | None, flags: int) -> _Part:
        """`x{2,4}` is x x (x (x)?)?, so that every copy has few ways on; `x{2,}` is x x+."""
        if most == 0:
            return _EMPTY
        last = self.sequence(inner, flags)
        if not last.first:
            return _EMPTY
        copies = max(least, 1) if most is None else most
        if copies > MAX_POSITIONS:
            raise BadPattern(f"is too large: more than {MAX_POSITIONS} repetitions")
        if most is None:
            self._connect(last.last, last.first)
        whole = _Part(last.nullable or least < copies, last.first, last.last)
        for number in range(copies - 1, 0, -1):
            joined = self._join(self.sequence(inner, flags), whole)
            whole = _Part(joined.nullable or number > least, joined.first, joined.last)
        return whole

    def _join(self, left: _Part, right: _Part) -> _Part:
        self._connect(left.last, right.first)
        return _Part(
            left.nullable and right.nullable,
            left.first + right.first if left.nullable else left.first,
            left.last + right.last if right.nullable else right.last,
        )

    def _connect(self, sources: Iterable[int], targets: tuple[int, ...]) -> None:
        for source in sources:
            known = self.follow[source]
            self._edges -= len(known)
            known.update(dict.fromkeys(targets))
            self._edges += len(known)
            if self._edges > MAX_EDGES:
                raise BadPattern(f"is too large: more than {MAX_EDGES} ways from character to character")


def _either(parts: Iterable[_Part]) -> _Part:
    whole = _Part(False)
    for part in parts:
        whole = _Part(whole.nullable or part.nullable, whole.first + part.first, whole.last + part.last)
    return whole


def _test(kind: str, value: Any, flags: int) -> Test:
    """Whether one character is what this item of the pattern means."""
    if kind == "ANY":
        return (lambda char: True) if flags & re.DOTALL else "\n".__ne__
    plain = _plain_test(kind, value, bool(flags & re.ASCII))
    if not flags & re.IGNORECASE:
        return plain if kind == "LITERAL" else lru_cache(maxsize=KNOWN_CHARS)(plain)
    is_negated = kind == "NOT_LITERAL" or (kind == "IN" and str(value[0][0]) == "NEGATE")
    choose = all if is_negated else any
    return lru_cache(maxsize=KNOWN_CHARS)(lambda char: choose(map(plain, (char, char.lower(), char.upper()))))


def _plain_test(kind: str, value: Any, ascii_only: bool) -> Test:
    if kind == "LITERAL":
        return chr(value).__eq__
    if kind == "NOT_LITERAL":
        return chr(value).__ne__
    if kind == "RANGE":
        low, high = map(chr, value)
        return lambda char: low <= char <= high
    if kind == "CATEGORY":
        return _category(str(value), ascii_only)
    negated = str(value[0][0]) == "NEGATE"
    members = tuple(_plain_test(str(k), v, ascii_only) for k, v in value[negated:])
    return lambda char: any(member(char) for member in members) != negated


def _category(name: str, ascii_only: bool) -> Test:
    base = name.removeprefix("CATEGORY_")
    negated, base = base.startswith("NOT_"), base.removeprefix("NOT_")
    meaning: dict[str, Test] = {"DIGIT": str.isdecimal, "SPACE": str.isspace, "WORD": _is_word}
    inside = meaning[base]
    return lambda char: (inside(char) and (not ascii_only or char.isascii())) != negated


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"
