"""Stop patterns in text that comes in pieces, together with stop strings; leaves ids and counting to `request_stream`.

The text ends at the first character that completes any stop. Of each pattern's position only the earliest start is
kept, so a character costs a bounded number of moves however long the text is. What may still become a match is held
back, from the earliest start on, but never more than MAX_HELD characters: of a longer match the beginning has been
shown already, and the match still ends the text.

A pattern that ends in `$` matches where the text so far ends: at the end of what one `push` brings, a token.

    pattern  [0-9]+ EUR      text  "pay 12 E"      shown "pay "      held "12 E"

A search library was no choice: those in linear time answer for a whole text, not for one that grows, and those that
know partial matches backtrack.
"""

from __future__ import annotations

from services.detokenizer.stops import StopMatch, automaton
from shared.stop_regex import ACCEPT, Program, compile_pattern

MAX_HELD = 1024


class PatternRun:
    """One pattern over one text. `threads` maps each live position to the place where its earliest match began."""

    __slots__ = ("_program", "threads")

    def __init__(self, program: Program) -> None:
        self._program = program
        self.threads: dict[int, int] = {}

    @property
    def pattern(self) -> str:
        return self._program.pattern

    @property
    def at_end(self) -> bool:
        return self._program.at_end

    def step(self, char: str, place: int) -> int | None:
        """Take the character at `place`; the place where the match that it completes began, or None."""
        program = self._program
        tests = program.tests
        began: int | None = None
        following: dict[int, int] = {}
        for position, start in self.threads.items():
            if tests[position](char):
                began = _enter(program.follow[position], start, following, began)
        for position in program.first:
            if position not in self.threads and tests[position](char):
                began = _enter(program.follow[position], place, following, began)
        self.threads = following
        return began

    def earliest(self, place: int) -> int:
        """Where the earliest match that may still come begins; `place` where there is none."""
        return min(self.threads.values(), default=place)


class MixedMatcher:
    """Stop strings and stop patterns over one text."""

    __slots__ = ("_automaton", "_held", "_place", "_runs", "_state")

    def __init__(self, stops: tuple[str, ...], patterns: tuple[str, ...]) -> None:
        self._automaton = automaton(stops)
        self._runs = [PatternRun(compile_pattern(pattern)) for pattern in patterns]
        self._state = 0
        self._place = 0  # characters taken
        self._held = ""

    def push(self, text: str) -> tuple[str, StopMatch | None]:
        """(text that may be shown, what ended it). Of stops that one character completes the longest counts."""
        for index, char in enumerate(text):
            found = self._step(char, index + 1 == len(text))
            self._place += 1
            if found is not None:
                whole = self._held + text[: index + 1]
                length = min(found[0], len(whole))
                self._held = ""
                shown = len(whole) - length
                return whole[:shown], StopMatch(found[1], whole[shown:])
        whole = self._held + text
        held = min(self._place - self._earliest(), MAX_HELD, len(whole))
        shown = len(whole) - held
        self._held = whole[shown:]
        return whole[:shown], None

    def flush(self) -> str:
        """What was held back, once it is certain that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _step(self, char: str, is_last: bool) -> tuple[int, str] | None:
        """(length, name) of the longest stop that `char` completes."""
        self._state = self._automaton.step(self._state, char)
        stop = self._automaton.matched[self._state]
        found = (len(stop), stop) if stop else None
        for run in self._runs:
            began = run.step(char, self._place)
            if run.at_end and not is_last:
                continue
            if began is not None and (found is None or self._place + 1 - began > found[0]):
                found = (self._place + 1 - began, run.pattern)
        return found

    def _earliest(self) -> int:
        place = self._place
        return min([place - self._automaton.depth[self._state], *(run.earliest(place) for run in self._runs)])


def _enter(positions: tuple[int, ...], start: int, following: dict[int, int], began: int | None) -> int | None:
    """Put threads on these positions; earlier starts win. Returns the earliest start of a match that is complete."""
    for position in positions:
        if position == ACCEPT:
            began = start if began is None else min(began, start)
        elif start < following.get(position, start + 1):
            following[position] = start
    return began
