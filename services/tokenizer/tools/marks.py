"""Finds a mark in a text that comes in pieces, and holds back no more than what may be its beginning."""

from __future__ import annotations

from collections.abc import Callable

BLANKS = " \t\r\n"


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `mark`."""
    for size in range(min(len(text), len(mark) - 1), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


class TextBefore:
    """Text up to a mark. Blanks around marks are nobody's text: one line break stands for them
    between two texts. Blanks elsewhere are kept.

    "Sure.\\n<tool_call>..."    text "Sure."    rest "..."
    """

    def __init__(self, mark: str, say: Callable[[str], None]) -> None:
        self._mark = mark
        self._say = say
        self._held = ""
        self._blanks = ""  # before the mark
        self._after_mark = False  # a mark came before: blanks here belong to it
        self._spoken = False  # since the last mark
        self._ever_spoken = False

    def feed(self, text: str) -> str | None:
        """Says what is certainly text. What follows the mark, or None where there is none yet."""
        text = self._held + text
        self._held = ""
        at = text.find(self._mark)
        if at >= 0:
            before = text[:at].rstrip(BLANKS)
            self._blanks = text[len(before) : at]
            self._speak(before)
            self._after_mark, self._spoken = True, False
            return text[at + len(self._mark) :]
        sure = len(text) - overlap(text, self._mark)
        sure = len(text[:sure].rstrip(BLANKS))
        self._speak(text[:sure])
        self._held = text[sure:]
        return None

    def literal(self, text: str) -> None:
        """The mark and what followed looked like a call and is none: `text` begins with the mark."""
        self._after_mark = False
        self._speak(self._blanks + text)

    def finish(self) -> None:
        """The answer has ended: what was held back is text after all."""
        held, self._held = self._held, ""
        if self._after_mark and not self._spoken:
            held = held.strip(BLANKS)
        self._speak(held)

    def _speak(self, text: str) -> None:
        if self._after_mark and not self._spoken:
            text = text.lstrip(BLANKS)
            text = f"\n{text}" if text and self._ever_spoken else text
        if text:
            self._spoken = self._ever_spoken = True
            self._say(text)
