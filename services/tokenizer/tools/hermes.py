"""Calls as Hermes and Qwen models write them. Leaves the object inside to call_object.

Let me look.
<tool_call>
{"name": "weather", "arguments": {"city": "Paris"}}
</tool_call>
"""

from __future__ import annotations

from collections.abc import Collection

from services.tokenizer.tools.call_object import CallObject
from services.tokenizer.tools.emitter import Emitter
from services.tokenizer.tools.marks import BLANKS, TextBefore

BEGIN = "<tool_call>"
END = "</tool_call>"


class HermesParser:
    """Text, calls and text again, in any order."""

    def __init__(self, names: Collection[str], out: Emitter) -> None:
        self._names = names
        self._out = out
        self._text = TextBefore(BEGIN, out.text)
        self._call: CallObject | None = None
        self._closing = False  # a call is over, its end mark is not
        self._broken: TextBefore | None = None  # all up to the end mark is of no use
        self._held = ""

    def feed(self, text: str) -> None:
        while text:
            if self._call is not None:
                text = self._in_call(self._call, text)
            elif self._broken is not None:
                rest = self._broken.feed(text)
                self._broken = None if rest is not None else self._broken
                text = rest or ""
            elif self._closing:
                text = self._close(text)
            else:
                rest = self._text.feed(text)
                self._call = CallObject(self._names, self._out) if rest is not None else None
                text = rest or ""

    def finish(self) -> None:
        if self._call is not None and not self._call.started:
            self._text.literal(BEGIN + self._call.raw)
        self._text.finish()

    def _in_call(self, call: CallObject, text: str) -> str:
        end = call.feed(text)
        if call.failed and not call.started:
            self._text.literal(BEGIN + call.raw)
        elif call.failed:
            self._broken = TextBefore(END, _nobody)
        elif call.done:
            self._closing = True
        if call.failed or call.done:
            self._call = None
        return text[end:]

    def _close(self, text: str) -> str:
        """The end mark is eaten if it is there; models forget it before they stop."""
        text = (self._held + text).lstrip(BLANKS)
        self._held = ""
        if len(text) < len(END) and END.startswith(text):
            self._held = text
            return ""
        self._closing = False
        return text.removeprefix(END)


def _nobody(text: str) -> None:
    """Nobody hears this."""
