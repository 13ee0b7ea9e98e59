"""How often guesses come true, by how long they have been true already. Leaves guessing to foresight.

Every guess is counted, whether a step carried it or not: what a row samples tells of each whether it was right.
"""

from __future__ import annotations

LONGEST = 24
"""Streaks beyond are alike."""
MEMORY = 256
"""So many trials of one streak, then the older half counts half."""
BELIEF = 5.0
"""Guesses of its own that weigh as much for one text as what is known of all texts."""
FADE = 0.06
"""Of them with every guess: about the last sixteen count."""


class Record:
    """How one text's guesses do beside those of all texts: it may be one that repeats itself, or never does.

    Misses are counted whatever the streak was. Where many rows decode, the texts that are left at the end are those
    whose streaks end early, and the long streaks of the others say nothing of them.
    """

    __slots__ = ("_missed", "_tried")

    def __init__(self) -> None:
        self._missed = self._tried = 0.0

    def count(self, *, hit: bool) -> None:
        """A guess was right or wrong."""
        self._tried += 1 - self._tried * FADE
        self._missed += (not hit) - self._missed * FADE

    def weights(self) -> tuple[float, float]:
        """(belief, own): a guess that misses in `miss` of all texts misses in belief * miss + own of this one's."""
        whole = BELIEF + self._tried
        return BELIEF / whole, self._missed / whole


class Odds:
    """Of one source of guesses; `first` is what is believed of a streak of one before anything was seen."""

    def __init__(self, first: float) -> None:
        # Belief grows with the streak: as if the misses of a streak of n had become rarer by n.
        self._trials = [4.0] * (LONGEST + 1)
        self._hits = [4.0 * (1 - (1 - first) / max(streak, 1)) for streak in range(LONGEST + 1)]

    def count(self, streak: int, *, hit: bool) -> None:
        """A guess after `streak` right ones in a row was right or wrong."""
        at = min(streak, LONGEST)
        self._trials[at] += 1
        self._hits[at] += hit
        if self._trials[at] > MEMORY:
            self._trials[at] /= 2
            self._hits[at] /= 2

    def of(self, streak: int) -> float:
        """The share of right guesses after `streak` right ones."""
        at = min(streak, LONGEST)
        return self._hits[at] / self._trials[at]

    def worth(self, streak: int, most: int, price: float, record: Record) -> tuple[int, float]:
        """How many guesses in a row to send, and what they bring, in tokens.

        The last of n guesses only counts where all n are right. `price`: what one more row costs, in tokens that
        its time would bring otherwise; a guess that is less likely to count is not sent. `record`: of the text.
        """
        belief, own = record.weights()
        hits, trials = self._hits, self._trials
        chance, gain, at = 1.0, 0.0, min(streak, LONGEST)
        right = 1.0 - belief * (1.0 - hits[at] / trials[at]) - own
        for count in range(most):
            chance *= right
            if chance < price:
                return count, gain
            gain += chance - price
            if at < LONGEST:
                at += 1
                right = 1.0 - belief * (1.0 - hits[at] / trials[at]) - own
        return most, gain
