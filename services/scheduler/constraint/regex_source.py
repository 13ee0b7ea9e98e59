"""Reads a user's regular expression: refuses what would be misread, and makes `\\d` mean the digits 0-9.

The dialect is that of the Rust `regex` crate without look-around; the whole text must match. What is plainly an
error there is left to the engine, whose message `explain` makes readable. Refused here is what the engine would
silently take differently from other dialects: doubled quantifiers, a repeated anchor, a backslash at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from services.scheduler.constraint.errors import BadSource
from services.scheduler.constraint.limits import Limits

_COUNTED = re.compile(r"\{\d*,?\d*\}")
_VERBOSE = re.compile(r"\(\?[A-Za-z]*x")
_LOOK_AROUND = ("(?=", "(?!", "(?<=", "(?<!")


def check_regex(pattern: str, limits: Limits, *, may_be_empty: bool = False) -> None:
    """Raises BadSource with the column."""
    if not pattern and not may_be_empty:
        raise BadSource("the pattern is empty")
    if _VERBOSE.search(pattern) and ("#" in pattern or "\n" in pattern):
        raise BadSource("verbose patterns with comments or several lines are not supported")
    depth = 0
    before = "start"
    for offset, piece, in_class in _pieces(pattern):
        if in_class:
            before = "atom"
            continue
        if piece == "\\":
            raise _at(offset, "a backslash at the end escapes nothing")
        if piece == "(":
            look = next((mark for mark in _LOOK_AROUND if pattern.startswith(mark, offset)), None)
            if look:
                raise _at(offset, f"look-around {look}...) is not supported")
            depth += 1
            if depth > limits.depth:
                raise _at(offset, f"nested deeper than {limits.depth} groups")
        elif piece == ")":
            depth -= 1
        before = _after(piece, before, offset)


def check_classes(pattern: str) -> None:
    """Refuses what JSON Schema's dialect reads as characters of a class and the engine as operators on classes."""
    inside, before = False, ""
    for offset, piece, in_class in _pieces(pattern):
        if inside and in_class:
            if piece == "[":
                raise _at(offset, "a [ inside a character class must be written \\[")
            if piece == before and piece in ("&", "-", "~"):
                raise _at(offset, f"{piece} inside a character class must be written \\{piece}")
        inside, before = in_class, piece


def ascii_digits(pattern: str) -> str:
    """The same pattern with `\\d` spelled as the digits 0-9, so that a number stays a number for every reader."""
    out = []
    for _, piece, in_class in _pieces(pattern):
        out.append(("0-9" if in_class else "[0-9]") if piece == "\\d" else piece)
    return "".join(out)


def explain(error: str) -> tuple[str, str]:
    """(reason, place) of the engine's message about a regular expression."""
    reason = re.search(r"^error: (.*)$", error, re.MULTILINE)
    caret = re.search(r"regex parse error:\n    .*\n    ( *)\^", error)
    if reason:
        return reason[1], f"column {len(caret[1]) + 1}" if caret else ""
    unsupported = re.search(r"lookarounds not supported yet; (\w+)", error)
    if unsupported:
        names = {"End": "$ inside the pattern", "Start": "^ inside the pattern", "WordUnicode": r"\b"}
        return f"{names.get(unsupported[1], unsupported[1])} is not supported", ""
    return first_line(error), ""


def first_line(error: str) -> str:
    """The engine's message without the excerpts of the grammar it was translated to."""
    line = error.replace("<non-verbose/>", "").strip().split("\n", 1)[0]
    return re.sub(r"^(at )?\d+\(\d+\): ", "", line)[:300]


def _after(piece: str, before: str, offset: int) -> str:
    """What kind of thing `piece` is, given the one before it. Raises BadSource for a quantifier in a wrong place."""
    if piece in ("*", "+", "?") or (len(piece) > 1 and piece[0] == "{"):
        if before == "anchor":
            raise _at(offset, "an anchor cannot be repeated")
        if before == "quantifier" and piece == "?":
            return "lazy"
        if before in ("quantifier", "lazy"):
            raise _at(offset, "a quantifier cannot follow a quantifier")
        return "quantifier"
    return "anchor" if piece in ("^", "$") else "atom"


def _pieces(pattern: str) -> Iterator[tuple[int, str, bool]]:
    """(offset, piece, inside a character class); a piece is one character, an escape or a counted repeat."""
    offset = 0
    depth = 0  # of nested character classes
    opened = -1
    while offset < len(pattern):
        start = offset
        character = pattern[offset]
        if character == "\\":
            offset += min(2, len(pattern) - offset)
        elif not depth and character == "{" and (counted := _COUNTED.match(pattern, offset)):
            offset = counted.end()
        else:
            offset += 1
            if character == "[":
                depth += 1
                opened = offset + pattern.startswith("^", offset)
            elif character == "]" and depth and start != opened:
                depth -= 1
        yield start, pattern[start:offset], depth > 0


def _at(offset: int, reason: str) -> BadSource:
    return BadSource(reason, f"column {offset + 1}")
