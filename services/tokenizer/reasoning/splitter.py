"""Splits an answer into reasoning and speech as it comes in. Leaves where the prompt left off to its user.

<think>            dropped, may be missing where the prompt ends with it
2 + 2 is 4.        reasoning: "2 + 2 is 4."
</think>           dropped, with the blanks around it

Four.              speech: "Four."
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from services.tokenizer.reasoning.styles import Style
from services.tokenizer.tools.marks import BLANKS, Pending, TextBefore

Say = Callable[[str], None]


class Splitter:
    """One answer. `opened`: the prompt has begun the reasoning. `end_id`: the end mark's token, -1 if it is none."""

    def __init__(self, style: Style, opened: bool, end_id: int, think: Say, speak: Say) -> None:
        self._style = style
        self._opened = opened
        self._end_id = end_id
        self._think = think
        self._speak = speak
        self._thoughts = TextBefore(style.end, self._begin_thought)
        self._thought = False  # something was thought aloud
        self._pending = Pending()
        self._state: Literal["begin", "thinking", "ended", "speaking"] = "begin"
        self._counting = True
        self._entered = False
        self._beyond = 0  # characters that came with the end mark, behind it
        self.tokens = 0  # of the reasoning, its marks included

    def feed(self, text: str, ids: Sequence[int] = ()) -> None:
        if text:
            self._text(text)
        if self._counting:
            self._count(ids, len(text))

    @property
    def ended(self) -> bool:
        """The reasoning was there, and its end mark."""
        return self._entered and self._state in ("ended", "speaking")

    def finish(self) -> None:
        if self._state == "begin":
            held = self._pending.text
            (self._think if self._opened and held.strip(BLANKS) else self._speak)(held)
        elif self._state == "thinking":
            self._thoughts.finish()

    def _text(self, text: str) -> None:
        if self._state == "begin":
            text = self._begin(self._pending.with_more(text))
        self._entered = self._entered or self._state == "thinking"
        if self._state == "thinking" and text:
            rest = self._thoughts.feed(text)
            if rest is None:
                return
            self._state, text = "ended", rest
            self._beyond = len(rest)
        if self._state == "ended":
            text = text.lstrip(BLANKS)
            self._state = "speaking" if text else "ended"
        if self._state == "speaking" and text:
            self._speak(text)

    def _begin(self, text: str) -> str:
        """Is there a begin mark? What follows it, or what is no mark."""
        mark = self._style.begin
        rest = text.lstrip(BLANKS)
        if rest.startswith(mark):
            self._state = "thinking"
            return rest[len(mark) :]
        if mark.startswith(rest):
            if text:
                self._pending.hold(text)
            return ""
        self._state = "thinking" if self._opened else "speaking"
        return text

    def _begin_thought(self, text: str) -> None:
        text = text if self._thought else text.lstrip(BLANKS)
        if text:
            self._thought = True
            self._think(text)

    def _count(self, ids: Sequence[int], num_chars: int) -> None:
        """Tokens up to the end mark: exact where that is one token, else by the share of the text."""
        if self._state == "speaking" and not self._entered:
            self._counting, self.tokens = False, 0
        elif self.ended and self._end_id in ids:
            self._counting, self.tokens = False, self.tokens + list(ids).index(self._end_id) + 1
        else:
            self._counting = not self.ended
            self.tokens += len(ids) - (len(ids) * self._beyond // num_chars if self._beyond else 0)
