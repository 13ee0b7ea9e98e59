"""Guesses what a request samples next from what was written before. Leaves sending guesses to drafting.

Two sources: where the request's last tokens stood before in its own text, what followed there follows again (prompt
lookup: Saxena, 2023; as drafts of speculative decoding: Leviathan et al., 2023); and where the radix tree holds an
answer to the same text, that answer.

    own text    a b c d e f . . . b c d          the last tokens b c d stood before, so guess e f ...
                      ^ at

A text that repeats itself but for a word, a number that counts or a name that was changed, goes on behind it as before:

    own text    a b c d e f . . . a b x          c was guessed, and a b had been right: go on with d e f ...
"""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.node import TOKEN_BYTES
from services.scheduler.odds import Odds, Record

LONGEST_CONTEXT = 4
"""Tokens that are looked for; fewer where so many did not stand before."""
LOYAL = 3
"""Right guesses in a row after which a single wrong one is taken for a changed word."""
FOUND = 2
"""Tokens that must have stood before to begin from there instead."""
WINDOW = 4096 * TOKEN_BYTES
"""How far back they are looked for."""


def behind_last(text: bytes | bytearray, needle: bytes | bytearray, start: int, end: int) -> int:
    """Behind the last place of some tokens, which end by `end`, all in bytes; -1: there is none."""
    place = text.rfind(needle, start, end)
    while place % TOKEN_BYTES and place >= 0:
        place = text.rfind(needle, start, place + len(needle) - 1)
    return place + len(needle) if place >= 0 else -1


class Foresight:
    """All tokens of one request so far and where its next guess stands. `own` and `known` learn how guesses do."""

    __slots__ = ("_at", "_known", "_odds", "_own", "_record", "_source", "_text", "asked", "streak")

    def __init__(self, tokens: bytes, own: Odds, known: Odds) -> None:
        self._text = bytearray(tokens)
        self._source: bytes | bytearray = self._text
        self._at = -1  # the next guess, in bytes; -1: none
        self._own = own
        self._known = known
        self._odds = own
        self._record = Record()
        self.streak = 0  # how many of its guesses have been right, with the context that was found
        self.asked = -1  # tokens there were when the tree was asked last
        self._look()

    @property
    def num_tokens(self) -> int:
        return len(self._text) // TOKEN_BYTES

    @property
    def guesses(self) -> bool:
        """Whether there is a guess at all."""
        return self._at >= 0

    def text(self) -> bytes:
        return bytes(self._text)

    def learn(self, tokens: Iterable[int]) -> None:
        """These were sampled."""
        text = self._text
        for token in tokens:
            packed = token.to_bytes(TOKEN_BYTES, "little")
            if self._at >= 0:
                hit = self._source[self._at : self._at + TOKEN_BYTES] == packed
                self._record.count(hit=hit)
                self._odds.count(self.streak, hit=hit)
                text += packed
                self._go_on(hit=hit)
            else:
                text += packed
                self._look()

    def _go_on(self, *, hit: bool) -> None:
        """One guess further, which was right or not."""
        behind = self._at + TOKEN_BYTES
        if hit:
            self.streak += 1
            self._at = behind
            if behind >= len(self._source):
                self._look()
        elif self._source is self._text and self.streak >= LOYAL:
            streak = self.streak // 2
            self._look(FOUND)
            if self._at < 0:
                self._at, self.streak = behind, streak
        else:
            self._look()

    def follow(self, tokens: bytes) -> None:
        """The tree knows what came after this text."""
        self._source, self._at, self._odds = tokens, 0, self._known
        self.streak = 1

    def worth(self, most: int, price: float, behind: int = 0) -> tuple[int, float]:
        """As Odds.worth for the guesses there are; `behind`: for those behind so many, once these have come true."""
        if self._at < 0:
            return 0, 0.0
        if self._source is not self._text:
            most = max(min(most, (len(self._source) - self._at) // TOKEN_BYTES - behind), 0)
        return self._odds.worth(self.streak + behind, most, price, self._record)

    def guess(self, count: int) -> bytes:
        """The next `count` guesses, int32 each. Where its own text ends, it goes on with the guesses themselves."""
        size = count * TOKEN_BYTES
        found = bytes(self._source[self._at : self._at + size])
        if len(found) < size and found:
            found *= -(-size // len(found))
        return found[:size]

    def _look(self, least: int = 1) -> None:
        """Find the last place where the text's last tokens stood before, `least` of them."""
        text = self._text
        self._source, self._odds = text, self._own
        end = len(text)
        start = max(0, end - WINDOW)
        for length in range(LONGEST_CONTEXT, least - 1, -1):
            size = length * TOKEN_BYTES
            if end - start <= size:
                continue
            needle = text[end - size :]
            at = behind_last(text, needle, start, end - TOKEN_BYTES)
            if at >= 0:
                self._at, self.streak = at, length
                return
        self._at = -1
