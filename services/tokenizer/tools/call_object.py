"""Reads {"name": ..., "arguments": {...}} as it comes in: the name first, then the arguments piece by piece.

Leaves what stands around the object to the formats. Keys may come in any order: arguments before the name wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

import msgspec

from services.tokenizer.tools.json_scan import ValueScanner
from services.tokenizer.tools.marks import BLANKS

_ARGUMENTS = ("arguments", "parameters")
State = Callable[[str, int], int]
_MOST_OF_A_NAME = 512  # characters of a key or a name; longer ones are text


class Sink(Protocol):
    """Takes what was read."""

    def start(self, name: str) -> None: ...

    def arguments(self, text: str) -> None: ...

    def end(self) -> None: ...


class CallObject:
    """One object. `names`: the tools there are; `name_first`: other orders are no call."""

    def __init__(self, names: Collection[str], sink: Sink, *, name_first: bool = False) -> None:
        self._names = names
        self._sink = sink
        self._name_first = name_first
        self._state: State = self._open
        self._raw: list[str] = []  # all of it, until the call has begun
        self._key = ""
        self._word = ""  # of a key, a name or of arguments that are a string
        self._scanner = ValueScanner()
        self._early = ""  # arguments that came before the name
        self._has_arguments = False
        self.started = False
        self.done = False
        self.failed = False

    @property
    def raw(self) -> str:
        """The text read so far, of an object that failed before it began to be a call."""
        return "".join(self._raw)

    def feed(self, text: str, at: int = 0) -> int:
        """Where reading stopped: behind the object, at the fault, or at the end of `text`."""
        begin = at
        while at < len(text) and not (self.done or self.failed):
            if text[at] in BLANKS and self._state not in (self._read_key, self._value):
                at += 1
            else:
                at = self._state(text, at)
        if not self.started:
            self._raw.append(text[begin:at])
        return at

    # States: each reads on from `at` and says where it stopped

    def _open(self, text: str, at: int) -> int:
        return self._expect(text, at, "{", self._first_key)

    def _first_key(self, text: str, at: int) -> int:
        return self._close(at) if text[at] == "}" else self._begin_key(text, at)

    def _begin_key(self, text: str, at: int) -> int:
        self.failed = text[at] != '"'
        self._word, self._scanner, self._state = "", ValueScanner(), self._read_key
        return at

    def _read_key(self, text: str, at: int) -> int:
        end = self._scanner.feed(text, at)
        self._word += text[at:end]
        if len(self._word) > _MOST_OF_A_NAME:
            self.failed = True
        elif self._scanner.done:
            self._key = _decoded(self._word)
            self.failed = self._name_first and not self.started and self._key != "name"
            self._state = self._colon
        return end

    def _colon(self, text: str, at: int) -> int:
        return self._expect(text, at, ":", self._begin_value)

    def _begin_value(self, text: str, at: int) -> int:
        self._word, self._scanner, self._state = "", ValueScanner(), self._value
        self.failed = self._key in _ARGUMENTS and self._has_arguments
        return at

    def _value(self, text: str, at: int) -> int:
        end = self._scanner.feed(text, at)
        if self._key == "name":
            self._name(text[at:end])
        elif self._key in _ARGUMENTS:
            self._arguments(text[at:end])
        self.failed = self.failed or self._scanner.failed
        if self._scanner.done:
            self._state = self._after_value
        return end

    def _after_value(self, text: str, at: int) -> int:
        if text[at] == "}":
            return self._close(at)
        return self._expect(text, at, ",", self._begin_key)

    def _expect(self, text: str, at: int, character: str, then: State) -> int:
        if text[at] != character:
            self.failed = True
            return at
        self._state = then
        return at + 1

    # What the object says

    def _name(self, part: str) -> None:
        self._word += part
        if self.started or len(self._word) > _MOST_OF_A_NAME:
            self.failed = True
        elif self._scanner.done:
            name = _decoded(self._word)
            if name not in self._names:
                self.failed = True
                return
            self.started = True
            self._sink.start(name)
            early, self._early = self._early, ""
            if early:
                self._sink.arguments(early)

    def _arguments(self, part: str) -> None:
        self._has_arguments = True
        self._word += part if len(self._word) < 1 or self._word[0] in '"n' else ""
        if self._word[:1] in ('"', "n"):  # a string that holds JSON, or null: known at its end
            if self._scanner.done:
                self._pass(_unwrapped(self._word))
        else:
            self._pass(part)

    def _pass(self, text: str) -> None:
        if not self.started:
            self._early += text
        elif text:
            self._sink.arguments(text)

    def _close(self, at: int) -> int:
        if not self.started:
            self.failed = True
            return at
        if not self._has_arguments:
            self._sink.arguments("{}")
        self._sink.end()
        self.done = True
        return at + 1


def _decoded(word: str) -> str:
    try:
        return msgspec.json.decode(word, type=str)
    except msgspec.MsgspecError:
        return ""


def _unwrapped(word: str) -> str:
    """Arguments as JSON text of an object: written as null, or once more as a string."""
    if word == "null":
        return "{}"
    inner = _decoded(word)
    try:
        msgspec.json.decode(inner, type=dict)
    except (msgspec.MsgspecError, RecursionError):
        return word
    return inner
