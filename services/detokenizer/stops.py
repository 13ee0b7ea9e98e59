"""Stop strings in text that comes in pieces: what may be shown, and where the text ends.

An Aho-Corasick automaton (Aho & Corasick 1975) over the characters. Its depth is the length of the longest
suffix that could still become a stop string: exactly what must be held back, and nothing more. The result
depends on the text alone, not on how it was cut into pieces. Leaves ids and counting to `request_stream`.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import NamedTuple


class StopMatch(NamedTuple):
    """What ended a text: the stop as the client named it, and the text it matched as far as it was held back."""

    name: str
    text: str


class StopAutomaton:
    """Shared by all requests with the same stop strings; never changes after it was built."""

    __slots__ = ("depth", "fallback", "first", "matched", "next")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.matched = [""]  # the longest stop string that ends in this state
        for stop in stops:
            if stop:
                self._insert(stop)
        self.first = frozenset(self.next[0])
        self.fallback = [0] * len(self.next)
        self._link()

    def step(self, state: int, char: str) -> int:
        while True:
            following = self.next[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fallback[state]

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            following = self.next[state].get(char)
            if following is None:
                following = len(self.next)
                self.next[state][char] = following
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.matched.append("")
            state = following
        self.matched[state] = stop

    def _link(self) -> None:
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self.next[state].items():
                self.fallback[following] = self.step(self.fallback[state], char)
                # Breadth first, so the shorter suffix already knows its match; the longest one wins.
                self.matched[following] = self.matched[following] or self.matched[self.fallback[following]]
                queue.append(following)


@lru_cache(maxsize=1024)
def automaton(stops: tuple[str, ...]) -> StopAutomaton:
    return StopAutomaton(stops)


class StopMatcher:
    """One text. The stop that is complete first ends it; of several complete at once the longest one counts."""

    __slots__ = ("_automaton", "_held", "_state")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._automaton = automaton(stops)
        self._held = ""
        self._state = 0

    def push(self, text: str) -> tuple[str, StopMatch | None]:
        """(text that may be shown, what ended it). After a match only what precedes the match is shown.

        What follows the match inside `text` is dropped; nothing may be pushed afterwards.
        """
        machine = self._automaton
        state = self._state
        if state == 0 and machine.first.isdisjoint(text):
            return text, None
        matched = machine.matched
        for position, char in enumerate(text):
            state = machine.step(state, char)
            if matched[state]:
                stop = matched[state]
                whole = self._held + text[: position + 1]
                self._held = ""
                return whole[: len(whole) - len(stop)], StopMatch(stop, stop)
        whole = self._held + text
        shown = len(whole) - machine.depth[state]
        self._state = state
        self._held = whole[shown:]
        return whole[:shown], None

    def flush(self) -> str:
        """What was held back, once it is certain that nothing follows."""
        held, self._held = self._held, ""
        self._state = 0
        return held
