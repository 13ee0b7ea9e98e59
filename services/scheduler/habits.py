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

from services.scheduler.node import TOKEN_BYTES
from services.scheduler.odds import Record
from services.scheduler.request import Request
from shared import ints
from shared.messages.request import Constraint

LONGEST_CONTEXT = 4
"""Tokens that are looked for; fewer where so many did not stand before."""
WINDOW = 2048 * TOKEN_BYTES
"""How far back they are looked for, and what is kept of a grammar's texts."""
MOST_GRAMMARS = 256
BORDER = b"\xff" * TOKEN_BYTES  # no token
ONCE, ALIKE, UNLIKE = range(3)
"""How often the context stood there, and whether what followed was the same the last two times."""
BELIEFS = {ONCE: 0.4, ALIKE: 0.9, UNLIKE: 0.15}
"""Of a context of the greatest length, before anything was seen."""
LEAST_CHANCE = 0.03
"""Guesses behind a less likely one are not worth finding."""
MOST_GUESSES = 32


class Case(NamedTuple):
    """What is known of a guess beside the guess: its context's length, and how it stood there."""

    length: int
    kind: int


class CaseOdds:
    """How often guesses of one source come true, by their case."""

    MEMORY = 128

    def __init__(self) -> None:
        self._hits: dict[Case, float] = {}
        self._trials: dict[Case, float] = {}

    def of(self, case: Case) -> float:
        belief = BELIEFS[case.kind] * (1 + case.length) / (1 + LONGEST_CONTEXT)
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
    start = max(len(text) - WINDOW, 0)
    for length in range(LONGEST_CONTEXT, 0, -1):
        needle = bytes(tail[-length * TOKEN_BYTES :])
        if len(needle) < length * TOKEN_BYTES:
            continue
        place = _find(text, needle, start, len(text) - TOKEN_BYTES)
        if place < 0:
            continue
        token = bytes(text[place : place + TOKEN_BYTES])
        if token == BORDER:
            continue
        before = _find(text, needle, start, place - TOKEN_BYTES)
        kind = ONCE if before < 0 else ALIKE if text[before : before + TOKEN_BYTES] == token else UNLIKE
        return Guess(token, Case(length, kind), odds)
    return None


def _find(text: bytes | bytearray, needle: bytes, start: int, end: int) -> int:
    """Behind the last place of the needle, which ends by `end`; -1: there is none."""
    place = text.rfind(needle, start, end)
    while place >= 0 and place % TOKEN_BYTES:
        place = text.rfind(needle, start, place + len(needle) - 1)
    return place + len(needle) if place >= 0 else -1


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

    __slots__ = ("_form_odds", "_forms", "_known", "_own_odds", "_record", "_run", "_text")

    def __init__(self, tokens: bytes, forms: bytearray, own_odds: CaseOdds, form_odds: CaseOdds) -> None:
        self._text = bytearray(tokens)
        self._forms = forms
        self._own_odds = own_odds
        self._form_odds = form_odds
        self._record = Record()
        self._run: list[tuple[int, float]] | None = None  # the guesses from here on and their chances

    def catch_up(self, request: Request) -> None:
        """Learn from what became known of the request since."""
        known = len(self._text) // TOKEN_BYTES
        for token in request.output[known - request.prompt_length :] if known < request.known else ():
            self._learn(token.to_bytes(TOKEN_BYTES, "little"))

    def worth(self, most: int, price: float) -> tuple[tuple[int, ...], float]:
        """The guesses to send where one row more costs as much as `price` tokens, and what they bring, in tokens."""
        if self._run is None:
            self._run = self._foresee()
        chance, gain, count = 1.0, 0.0, 0
        for _, each in self._run[:most]:
            chance *= each
            if chance < price:
                break
            gain += chance - price
            count += 1
        return tuple(token for token, _ in self._run[:count]), gain

    def _learn(self, token: bytes) -> None:
        guesses = self._guesses(self._text)
        if guesses:
            best = max(guesses, key=Guess.chance)
            self._record.count(best.chance(), hit=best.token == token)
        for guess in guesses:
            guess.odds.count(guess.case, hit=guess.token == token)
        self._text += token
        self._run = None

    def _guesses(self, tail: bytearray) -> list[Guess]:
        sources = (look_up(self._text, tail, self._own_odds), look_up(self._forms, tail, self._form_odds))
        return [guess for guess in sources if guess is not None]

    def _foresee(self) -> list[tuple[int, float]]:
        tail = self._text[-LONGEST_CONTEXT * TOKEN_BYTES :]
        run: list[tuple[int, float]] = []
        chance = 1.0
        while chance > LEAST_CHANCE and len(run) < MOST_GUESSES:
            guesses = self._guesses(tail)
            if not guesses:
                break
            best = max(guesses, key=Guess.chance)
            each = self._record.chance(best.chance())
            chance *= each
            run.append((ints.unpack(best.token)[0], each))
            tail += best.token
        return run
