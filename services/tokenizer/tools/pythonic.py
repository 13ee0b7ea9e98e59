"""Calls as a Python list, as Llama 4 and others write them. Leaves literals to python_literal.

    [weather(city="Paris"), weather(city="Rome", days=2)]

An answer that begins otherwise is text to its end. A call is passed on when its last bracket has come.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import msgspec

from services.tokenizer.tools.emitter import Emitter
from services.tokenizer.tools.marks import BLANKS, Pending
from services.tokenizer.tools.python_literal import NotLiteral, arguments

_START = "<|python_start|>"
_END = "<|python_end|>"
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_MOST_OF_A_NAME = 64
_PLAIN = re.compile(r"""[^"'()\[\]{}]*""")
_IN_STRING = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}


class PythonicParser:
    """One list of calls, then text."""

    def __init__(self, names: Collection[str], out: Emitter) -> None:
        self._names = names
        self._out = out
        self._pending = Pending()  # not yet known to be a call
        self._head = ""  # of the call at hand: its name, and what stands before it
        self._body: _Body | None = None
        self._state = "begin"  # or item, after, text
        self._states = {"begin": self._begin, "item": self._item, "after": self._after}

    def feed(self, text: str) -> None:
        while text:
            if self._state == "text":
                self._out.text(text)
                return
            if self._body is not None:
                text = self._in_body(self._body, text)
            elif text := self._pending.with_more(text):
                text = self._states[self._state](text)

    def finish(self) -> None:
        held = self._pending.text
        if self._body is not None:
            self._out.text(self._head + self._body.text)
        elif self._state != "text":
            self._out.text(held.strip(BLANKS + "],") if self._out.calls else held)

    def _begin(self, text: str) -> str:
        rest = text.lstrip(BLANKS)
        if rest.startswith(_START):
            rest = rest[len(_START) :].lstrip(BLANKS)
        if not rest or _START.startswith(rest):
            self._pending.hold(text)
            return ""
        if rest[0] != "[":
            return self._speak(text)
        self._state = "item"
        return text

    def _item(self, text: str) -> str:
        """A name and its bracket; the list's own bracket and the start mark may come first."""
        begin = text.find("[") + 1 if not self._out.calls else 0
        begin = len(text) - len(text[begin:].lstrip(BLANKS))
        if self._out.calls and text[begin : begin + 1] == "]":
            self._state = "after"
            return text[begin:]
        match = _NAME.match(text, begin)
        end = match.end() if match is not None else begin
        if end == len(text) and end - begin <= _MOST_OF_A_NAME:
            self._pending.hold(text)
            return ""
        if text[begin:end] in self._names and text[end] == "(":
            self._head, self._body = text[:end], _Body(text[begin:end])
            return text[end:]
        return self._speak(text)

    def _in_body(self, body: _Body, text: str) -> str:
        end = body.feed(text)
        if body.done:
            self._body = None
            if not self._pass(body):
                return self._speak(self._head + body.text + text[end:])
            self._state = "after"
        return text[end:]

    def _pass(self, body: _Body) -> bool:
        try:
            written = msgspec.json.encode(arguments(body.text[1:-1])).decode()
        except (NotLiteral, UnicodeEncodeError, OverflowError):
            return False
        self._out.start(body.name)
        self._out.arguments(written)
        self._out.end()
        return True

    def _after(self, text: str) -> str:
        """Behind a call: the next one, the end of the list, or text."""
        rest = text.lstrip(BLANKS)
        if rest.startswith(","):
            self._state = "item"
            return rest[1:]
        if rest.startswith("]"):
            rest = rest[1:].lstrip(BLANKS)
            if len(rest) < len(_END) and _END.startswith(rest):
                self._pending.hold(text)
                return ""
            return self._speak(rest.removeprefix(_END))
        return self._speak(rest)

    def _speak(self, text: str) -> str:
        self._state = "text"
        return text


class _Body:
    """The brackets of one call, with all between them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = False
        self._parts: list[str] = []
        self._depth = 0
        self._quote = ""
        self._escaped = False

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def feed(self, text: str) -> int:
        at = 0
        while at < len(text) and not self.done:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (_IN_STRING[self._quote] if self._quote else _PLAIN).match(text, at)
            at = match.end() if match is not None else at
            if at < len(text):
                self._sign(text[at])
                at += 1
        self._parts.append(text[:at])
        return at

    def _sign(self, sign: str) -> None:
        if self._quote:
            self._escaped = sign == "\\"
            self._quote = self._quote if self._escaped else ""
        elif sign in "\"'":
            self._quote = sign
        else:
            self._depth += 1 if sign in "([{" else -1
            self.done = self._depth == 0
