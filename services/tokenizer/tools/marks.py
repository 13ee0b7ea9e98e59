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


class Pending:
    """Text that cannot be judged yet. Blanks wait for what follows them, at no cost however many they are."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._blank = True  # all of them

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def with_more(self, text: str) -> str:
        """All of it and `text`, to be judged now; empty where all of it is blank and waits."""
        self._parts.append(text)
        self._blank = self._blank and not text.strip(BLANKS)
        if self._blank:
            return ""
        whole = self.text
        self.clear()
        return whole

    def hold(self, text: str) -> None:
        self._parts = [text]
        self._blank = not text.strip(BLANKS)

    def clear(self) -> None:
        self._parts = []
        self._blank = True


class TextBefore:
    """Text up to a mark. Blanks around marks are nobody's text: one line break stands for them
    between two texts. Blanks elsewhere are kept.

    "Sure.\\n<tool_call>..."    text "Sure."    rest "..."
    """

    def __init__(self, mark: str, say: Callable[[str], None]) -> None:
        self._mark = mark
        self._say = say
        self._tail = ""  # perhaps the beginning of the mark
        self._blanks: list[str] = []  # between what was said and the tail or the mark
        self._after_mark = False  # a mark came before: blanks here belong to it
        self._spoken = False  # since the last mark
        self._ever_spoken = False

    def feed(self, text: str) -> str | None:
        """Says what is certainly text. What follows the mark, or None where there is none yet."""
        text = self._tail + text
        at = text.find(self._mark)
        sure = at if at >= 0 else len(text) - overlap(text, self._mark)
        self._say_up_to_blanks(text[:sure])
        if at < 0:
            self._tail = text[sure:]
            return None
        self._tail = ""
        self._after_mark, self._spoken = True, False
        return text[at + len(self._mark) :]

    def literal(self, text: str) -> None:
        """The mark and what followed looked like a call and is none: `text` begins with the mark."""
        self._after_mark = False
        self._speak("".join(self._blanks) + text)
        self._blanks = []

    def finish(self) -> None:
        """The answer has ended: what was held back is text after all."""
        held = "".join(self._blanks) + self._tail
        self._blanks, self._tail = [], ""
        if self._after_mark and not self._spoken:
            held = held.strip(BLANKS)
        self._speak(held)

    def _say_up_to_blanks(self, text: str) -> None:
        words = text.rstrip(BLANKS)
        if words:
            self._speak("".join(self._blanks) + words)
            self._blanks = []
        self._blanks.append(text[len(words) :])

    def _speak(self, text: str) -> None:
        if self._after_mark and not self._spoken:
            text = text.lstrip(BLANKS)
            text = f"\n{text}" if text and self._ever_spoken else text
        if text:
            self._spoken = self._ever_spoken = True
            self._say(text)
