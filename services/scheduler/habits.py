"""What was written under each grammar lately, and what such a text goes on with. Leaves sending guesses to drafting.

A text under a grammar repeats its form, not its words: keys, marks and the order of things stand in the texts before
it, while names stand in its own prompt. So there are two sources, and whichever was right more often in the case at
hand says what comes next:

    texts of this grammar   {" name ": " Ann ", " age ":  7 }       the last tokens stood there: the form
    its own text            ... Maria is 34 years old ... {" name ": " Maria        a word begun is a word of the prompt
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import NamedTuple

from services.scheduler.foresight import LONGEST_CONTEXT, behind_last
from services.scheduler.node import TOKEN_BYTES
from services.scheduler.request import Request
from shared import ints
from shared.messages.request import Constraint

WINDOW = 2048 * TOKEN_BYTES
"""How far back they are looked for, and what is kept of a grammar's texts."""
MOST_GRAMMARS = 256
PLACES = 4
"""Where a context stood last: so many places are asked what followed."""
MOST_LEARNT = 64
"""Tokens that odds learn from at once; behind more of them it only goes on."""
BORDER = b"\xff" * TOKEN_BYTES  # no token


class Case(NamedTuple):
    """What is known of a guess beside the guess: its context's length, and after how many of its places it stood."""

    length: int
    alike: int
    places: int


class CaseOdds:
    """How often guesses of one source come true, by their case."""

    MEMORY = 128

    def __init__(self) -> None:
        self._hits: dict[Case, float] = {}
        self._trials: dict[Case, float] = {}

    def of(self, case: Case) -> float:
        belief = case.alike / (case.places + 1) * (LONGEST_CONTEXT + case.length) / (2 * LONGEST_CONTEXT)
        return (self._hits.get(case, 0.0) + 2 * belief) / (self._trials.get(case, 0.0) + 2)

    def count(self, case: Case, *, hit: bool) -> None:
        trials, hits = self._trials.get(case, 0.0) + 1, self._hits.get(case, 0.0) + hit
        scale = 0.5 if trials > self.MEMORY else 1.0
        self._trials[case], self._hits[case] = trials * scale, hits * scale


class Guess(NamedTuple):
    token: bytes
    case: Case
    odds: CaseOdds

    def chance(self) -> float:
        return self.odds.of(self.case)


def look_up(text: bytes | bytearray, tail: bytes | bytearray, odds: CaseOdds) -> Guess | None:
    """What stands in `text` behind the last tokens of `tail`, where they stood last; the longest context counts."""
    end = len(text) - TOKEN_BYTES
    start = max(end - WINDOW, 0)
    for length in range(min(LONGEST_CONTEXT, len(tail) // TOKEN_BYTES), 0, -1):
        needle = tail[-length * TOKEN_BYTES :]
        at = behind_last(text, needle, start, end)
        if at < 0:
            continue
        token = bytes(text[at : at + TOKEN_BYTES])
        if token == BORDER:
            continue
        places = alike = 1
        while places < PLACES and (at := behind_last(text, needle, start, at - TOKEN_BYTES)) >= 0:
            places += 1
            alike += text[at : at + TOKEN_BYTES] == token
        return Guess(token, Case(length, alike, places), odds)
    return None


class Habits:
    """The last texts of each grammar and namespace: what a tenant wrote helps no other one."""

    def __init__(self) -> None:
        self._texts: OrderedDict[bytes, bytearray] = OrderedDict()

    def of(self, namespace: bytes, constraint: Constraint) -> bytearray:
        """It grows as texts end; whoever holds it sees that, until it has become too long."""
        key = _key(namespace, constraint)
        text = self._texts.setdefault(key, bytearray())
        self._texts.move_to_end(key)
        if len(self._texts) > MOST_GRAMMARS:
            self._texts.popitem(last=False)
        return text

    def add(self, namespace: bytes, constraint: Constraint, tokens: bytes) -> None:
        """A text that has ended."""
        text = self.of(namespace, constraint)
        if len(text) + len(tokens) > 2 * WINDOW:
            text = self._texts[_key(namespace, constraint)] = text[-WINDOW:]
        text += tokens[-WINDOW:] + BORDER


def _key(namespace: bytes, constraint: Constraint) -> bytes:
    whole = b"\0".join((hashlib.sha256(namespace).digest(), constraint.kind.encode(), constraint.source.encode()))
    return hashlib.sha256(whole).digest()


class FormForesight:
    """Guesses for one request that obeys a grammar; `forms` are the texts of that grammar."""

    __slots__ = ("_form_odds", "_forms", "_known", "_own_odds", "_run", "_text")

    def __init__(self, tokens: bytes, forms: bytearray, own_odds: CaseOdds, form_odds: CaseOdds) -> None:
        self._text = bytearray(tokens[-WINDOW:])
        self._known = len(tokens) // TOKEN_BYTES
        self._forms = forms
        self._own_odds = own_odds
        self._form_odds = form_odds
        self._run: list[list[Guess]] = []  # what each source guesses of the tokens to come, the likelier one first

    def catch_up(self, request: Request) -> None:
        """Learn from what became known of the request since."""
        missing, self._known = request.known - self._known, request.known
        if missing > MOST_LEARNT:
            self._text += ints.pack(request.output[-missing:])
            self._run.clear()
        elif missing:
            for token in request.output[-missing:]:
                self._learn(token.to_bytes(TOKEN_BYTES, "little"))
        if len(self._text) > 2 * WINDOW:
            del self._text[:-WINDOW]

    def worth(self, most: int, price: float) -> tuple[tuple[int, ...], float]:
        """The guesses to send where one row more costs as much as `price` tokens, and what they bring, in tokens."""
        found: list[bytes] = []
        chance, gain = 1.0, 0.0
        while len(found) < most and (guesses := self._guesses(len(found), found)):
            chance *= guesses[0].chance()
            if chance < price:
                break
            gain += chance - price
            found.append(guesses[0].token)
        return tuple(ints.unpack(b"".join(found))), gain

    def _learn(self, token: bytes) -> None:
        guesses = self._guesses(0, [])
        for guess in guesses:
            guess.odds.count(guess.case, hit=guess.token == token)
        if guesses and guesses[0].token == token:
            del self._run[0]
        else:
            self._run.clear()
        self._text += token

    def _guesses(self, index: int, before: list[bytes]) -> list[Guess]:
        """Of the token `index` from now, if `before` are those before it; looked up once."""
        if index == len(self._run):
            tail = self._text[-LONGEST_CONTEXT * TOKEN_BYTES :] + b"".join(before[-LONGEST_CONTEXT:])
            sources = look_up(self._text, tail, self._own_odds), look_up(self._forms, tail, self._form_odds)
            self._run.append(sorted((g for g in sources if g is not None), key=Guess.chance, reverse=True))
        return self._run[index]
