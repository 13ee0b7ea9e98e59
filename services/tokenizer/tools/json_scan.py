"""Finds the end of one JSON value in a text that comes in pieces, without building it. Leaves meaning to its users."""

from __future__ import annotations

import re

_IN_STRING = re.compile(r'[^"\\]*')
_IN_NEST = re.compile(r'[^"\[\]{}]*')
_SCALAR = re.compile(r"[-+0-9a-zA-Z.]*")
_SCALAR_BEGINS = frozenset("-0123456789tfn")


class ValueScanner:
    """Reads one value from its first character on. `done`: its end was seen; `failed`: this is no value."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_scalar", "_started", "done", "failed")

    def __init__(self) -> None:
        self._depth = 0
        self._escaped = False
        self._in_string = False
        self._scalar = False
        self._started = False
        self.done = False
        self.failed = False

    def feed(self, text: str, at: int) -> int:
        """Where reading stopped: behind the value, at the fault, or at the end of `text`."""
        while at < len(text) and not (self.done or self.failed):
            if self._in_string:
                at = self._string(text, at)
            elif self._scalar:
                at = self._end(_SCALAR, text, at)
                self.done = at < len(text)
            elif self._started:
                at = self._end(_IN_NEST, text, at)
                at = self._mark(text, at) if at < len(text) else at
            else:
                at = self._begin(text, at)
        return at

    def _begin(self, text: str, at: int) -> int:
        self._started = True
        if text[at] in '"[{':
            return self._mark(text, at)
        self._scalar = text[at] in _SCALAR_BEGINS
        self.failed = not self._scalar
        return at

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        at = self._end(_IN_STRING, text, at)
        if at < len(text):
            self._escaped = text[at] == "\\"
            self._in_string = self._escaped
            self.done = not self._in_string and self._depth == 0
            at += 1
        return at

    def _mark(self, text: str, at: int) -> int:
        if text[at] == '"':
            self._in_string = True
        else:
            self._depth += 1 if text[at] in "[{" else -1
            self.done = self._depth == 0
        return at + 1

    @staticmethod
    def _end(run: re.Pattern[str], text: str, at: int) -> int:
        match = run.match(text, at)
        return match.end() if match is not None else at
