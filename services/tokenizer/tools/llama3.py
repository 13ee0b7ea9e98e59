"""Calls as Llama 3 models write them: the whole answer is one object, or several with `;` between them.

    {"name": "weather", "parameters": {"city": "Paris"}}
    <|python_tag|>{"name": "weather", "parameters": {"city": "Paris"}}

An answer that begins otherwise is text to its end. Leaves the object to call_object.
"""

from __future__ import annotations

from collections.abc import Collection

from services.tokenizer.tools.call_object import CallObject
from services.tokenizer.tools.emitter import Emitter
from services.tokenizer.tools.marks import BLANKS, Pending

TAG = "<|python_tag|>"
BETWEEN = ";"


class Llama3Parser:
    """Calls first, then text."""

    def __init__(self, names: Collection[str], out: Emitter) -> None:
        self._names = names
        self._out = out
        self._call: CallObject | None = None
        self._pending = Pending()  # what came since the last call
        self._before = ""  # and before the object at hand
        self._in_text = False
        self._broken = False

    def feed(self, text: str) -> None:
        while text and not self._broken:
            if self._in_text:
                self._out.text(text)
                return
            text = self._between(text) if self._call is None else self._in_call(self._call, text)

    def finish(self) -> None:
        held = self._pending.text
        if self._call is None:
            self._out.text(held.strip(BLANKS + BETWEEN) if self._out.calls else held)
        elif not self._call.started:
            self._out.text(self._before + self._call.raw)

    def _between(self, text: str) -> str:
        """Look for the beginning of a call; anything else is text."""
        held = self._pending.with_more(text)
        if not held:
            return ""
        skipped = BLANKS + BETWEEN if self._out.calls else BLANKS
        rest = held.lstrip(skipped)
        if rest.startswith(TAG):
            rest = rest[len(TAG) :].lstrip(BLANKS)
        if rest.startswith("{"):
            self._before = held[: len(held) - len(rest)]
            self._call = CallObject(self._names, self._out, name_first=True)
            return rest
        if not rest or TAG.startswith(rest):
            self._pending.hold(held)
            return ""
        self._in_text = True
        return rest if self._out.calls and TAG not in held else held

    def _in_call(self, call: CallObject, text: str) -> str:
        end = call.feed(text)
        if call.done:
            self._call = None
        elif call.failed and call.started:
            self._broken = True
        elif call.failed:
            self._call, self._in_text = None, True
            before = self._before.lstrip(BLANKS + BETWEEN) if self._out.calls else self._before
            return before + call.raw + text[end:]
        return text[end:]
