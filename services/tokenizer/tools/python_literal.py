"""Reads the arguments of a call written in Python, literals only, into JSON values. Nothing is ever run.

city="Paris", days=[1, 2], options={"units": None}
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MAX_DEPTH = 64
_TOKEN = re.compile(
    r"""\s*(?:
        (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)
      | (?P<name>[A-Za-z_][A-Za-z0-9_-]*)
      | (?P<sign>[\[\]{}(),:=])
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_SIMPLE = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": "", "\\": "\\", "'": "'", '"': '"'}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_CLOSE = {"[": "]", "(": ")", "{": "}"}


class NotLiteral(ValueError):
    """The text is more than names and literals, or less."""


def arguments(text: str) -> dict[str, Any]:
    """Keyword arguments by name. Raises NotLiteral."""
    reader = _Reader(text)
    values: dict[str, Any] = {}
    while reader.kind != "end":
        name = reader.take("name")
        reader.sign("=")
        if name in values:
            raise NotLiteral(name)
        values[name] = reader.value(0)
        if reader.kind != "end":
            reader.sign(",")
    return values


class _Reader:
    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self.kind, self.text = next(self._tokens)

    def take(self, kind: str) -> str:
        if self.kind != kind:
            raise NotLiteral(self.text)
        text = self.text
        self.kind, self.text = next(self._tokens)
        return text

    def sign(self, text: str) -> None:
        if self.take("sign") != text:
            raise NotLiteral(text)

    def value(self, depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise NotLiteral("nested too deeply")
        if self.kind == "string":
            return self._string()
        if self.kind == "number":
            return _number(self.take("number"))
        if self.kind == "name":
            word = self.take("name")
            if word not in _WORDS:
                raise NotLiteral(word)
            return _WORDS[word]
        opening = self.take("sign")
        if opening == "{":
            return dict(self._pairs(depth))
        if opening not in _CLOSE:
            raise NotLiteral(opening)
        return list(self._items(_CLOSE[opening], depth))

    def _string(self) -> str:
        """Strings beside each other are one, as in Python."""
        text = ""
        while self.kind == "string":
            text += _ESCAPE.sub(_unescaped, self.take("string")[1:-1])
        return text

    def _items(self, close: str, depth: int) -> Iterator[Any]:
        while not self._closed(close):
            yield self.value(depth + 1)
            if self.text != close:
                self.sign(",")

    def _pairs(self, depth: int) -> Iterator[tuple[str, Any]]:
        while not self._closed("}"):
            key = self._string() if self.kind == "string" else self.take("string")
            self.sign(":")
            yield key, self.value(depth + 1)
            if self.text != "}":
                self.sign(",")

    def _closed(self, close: str) -> bool:
        if self.kind == "sign" and self.text == close:
            self.take("sign")
            return True
        return False


def _unescaped(match: re.Match[str]) -> str:
    code = match[1] or match[2] or match[3]
    if code is None:
        return _SIMPLE.get(match[4], match[0])
    value = int(code, 16)
    return chr(value) if value <= 0x10FFFF else match[0]


def _number(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if value in (float("inf"), float("-inf")):
            raise NotLiteral(text) from None
        return value


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    at, text = 0, text.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise NotLiteral(text[at : at + 20])
        yield match.lastgroup, match[match.lastgroup]
        at = match.end()
    while True:
        yield "end", ""
