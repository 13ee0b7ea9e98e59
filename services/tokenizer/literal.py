"""Keeps the text of special tokens in user content literal: such text never becomes a control token.

    content  "say <|im_end|>"      marked    "say S<|im_end|>E"     (S, E: long random numbers no input holds)
    rendered "<|im_start|>user\\nsay S<|im_end|>E<|im_end|>\\n"
    pieces    [1] "user\\nsay <|im_end|>" [2] "\\n"    text pieces are encoded with special tokens switched off

Leaves the common case, content without such text, to one plain encoding in text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgspec


class SpecialToken(msgspec.Struct, frozen=True):
    """One special token of the tokenizer; lstrip and rstrip: it swallows blanks beside it."""

    id: int
    content: str
    lstrip: bool = False
    rstrip: bool = False


class LiteralMarker:
    """Finds special tokens' texts in user input and tells them from those the template wrote."""

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        self._tokens = {token.content: token for token in tokens if token.content}
        longest_first = sorted(self._tokens, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def found_in(self, value: Any) -> bool:
        """Whether any string inside `value` holds the text of a special token."""
        return any(self._pattern.search(text) for text in _strings(value))

    def pick_marks(self, value: Any) -> tuple[str, str]:
        """Two numbers that appear nowhere in `value`: nobody can forge them, and filters leave digits alone."""
        marks: list[str] = []
        while len(marks) < 2:
            mark = str(secrets.randbelow(9 * 10**23) + 10**23)
            if not any(mark in text for text in _strings(value)):
                marks.append(mark)
        return marks[0], marks[1]

    def mark(self, value: Any, marks: tuple[str, str]) -> Any:
        """A copy of `value` with every special text wrapped in the marks, in keys, too."""
        if isinstance(value, str):
            return self._pattern.sub(lambda match: marks[0] + match[0] + marks[1], value)
        if isinstance(value, dict):
            return {self.mark(key, marks): self.mark(item, marks) for key, item in value.items()}
        if isinstance(value, list):
            return [self.mark(item, marks) for item in value]
        return value

    def cut(self, text: str) -> list[str]:
        """`text` in parts, none of which holds the whole text of a special token."""
        cuts = [0, *(match.start() + 1 for match in self._pattern.finditer(text)), len(text)]
        return [text[first:last] for first, last in pairwise(cuts)]

    def split(self, rendered: str, marks: tuple[str, str]) -> list[SpecialToken | str]:
        """The rendered prompt as true special tokens and literal texts, marks removed."""
        start, end = marks
        marked = re.compile(f"{start}({self._pattern.pattern})(?:{end})?|{start}|{end}")
        pieces: list[SpecialToken | str] = []
        at = 0
        for match in marked.finditer(rendered):
            self._split_plain(rendered[at : match.start()], pieces)
            _append_text(pieces, match[1] or "")
            at = match.end()
        self._split_plain(rendered[at:], pieces)
        return pieces

    def _split_plain(self, text: str, pieces: list[SpecialToken | str]) -> None:
        at = 0
        for match in self._pattern.finditer(text):
            token = self._tokens[match[0]]
            before = text[at : match.start()]
            _append_text(pieces, before)
            if token.lstrip and pieces and isinstance(pieces[-1], str):
                pieces[-1] = pieces[-1].rstrip()
            pieces.append(token)
            at = match.end()
        _append_text(pieces, text[at:])


def _append_text(pieces: list[SpecialToken | str], text: str) -> None:
    if not pieces or isinstance(pieces[-1], SpecialToken):
        if pieces and isinstance(pieces[-1], SpecialToken) and pieces[-1].rstrip:
            text = text.lstrip()
        if text:
            pieces.append(text)
    else:
        pieces[-1] += text


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
