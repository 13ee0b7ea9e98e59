"""Calls as Mistral models write them, in both ways. Leaves objects to call_object and values to json_scan.

[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Paris"}}, ...]
[TOOL_CALLS]weather[ARGS]{"city": "Paris"}[TOOL_CALLS]...
"""

from __future__ import annotations

import re
from collections.abc import Collection

from services.tokenizer.tools.call_object import CallObject
from services.tokenizer.tools.emitter import Emitter
from services.tokenizer.tools.json_scan import ValueScanner
from services.tokenizer.tools.marks import BLANKS, TextBefore

MARK = "[TOOL_CALLS]"
ARGS = "[ARGS]"
_HEAD = re.compile(r"\s*([A-Za-z0-9_.-]{1,64})(?:\[CALL_ID\][A-Za-z0-9]{0,64})?(?:\[ARGS\])?\s*(?=\{)")
_MOST_OF_A_HEAD = 256


class MistralParser:
    """Text, then calls; a mark may come again."""

    def __init__(self, names: Collection[str], out: Emitter) -> None:
        self._names = names
        self._out = out
        self._text = TextBefore(MARK, out.text)
        self._head: str | None = None  # what follows a mark, until it is clear how the calls are written
        self._call: CallObject | None = None
        self._value: ValueScanner | None = None
        self._in_list = False
        self._broken = False  # a call that had begun is no call: the rest is of no use

    def feed(self, text: str) -> None:
        while text and not self._broken:
            if self._call is not None:
                text = self._in_call(self._call, text)
            elif self._value is not None:
                text = self._in_value(self._value, text)
            elif self._in_list:
                text = self._next_item(text)
            elif self._head is not None:
                text = self._in_head(self._head + text)
            else:
                self._head = self._text.feed(text)
                text = self._in_head(self._head) if self._head else ""

    def finish(self) -> None:
        if self._head is not None:
            call = self._call
            self._text.literal(MARK + self._head + (call.raw if call is not None else ""))
        self._text.finish()

    def _in_head(self, head: str) -> str:
        """Decide between a list, an object and a name; returns what is left to read."""
        self._head = head
        rest = head.lstrip(BLANKS)
        if rest.startswith(("[", "{")):
            self._in_list = rest[0] == "["
            self._call = CallObject(self._names, self._out)
            begin = len(head) - len(rest) + self._in_list  # a list's bracket is read here
            self._head = head[:begin]
            return head[begin:]
        match = _HEAD.match(head)
        if match is not None and match[1] in self._names:
            self._head = None
            self._out.start(match[1])
            self._value = ValueScanner()
            return head[match.end() :]
        if match is not None or "{" in head or len(head) > _MOST_OF_A_HEAD:
            self._head = None
            self._text.literal(MARK)
            return head
        return ""

    def _in_call(self, call: CallObject, text: str) -> str:
        end = call.feed(text)
        if call.started:
            self._head = None
        if call.failed and not call.started and self._head is not None:
            self._text.literal(MARK + self._head + call.raw)
            self._head, self._in_list = None, False
        elif call.failed:
            self._broken = True
        if call.failed or call.done:
            self._call = None
        return text[end:]

    def _in_value(self, value: ValueScanner, text: str) -> str:
        end = value.feed(text, 0)
        self._out.arguments(text[:end])
        if value.done:
            self._out.end()
            self._value = None
        return text[end:]

    def _next_item(self, text: str) -> str:
        text = text.lstrip(BLANKS + ",")
        if text.startswith("]"):
            self._in_list = False
            return text[1:]
        if text:
            self._call = CallObject(self._names, self._out)
        return text
