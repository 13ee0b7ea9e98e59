"""Closes the text inside its token budget: from where only a completion still fits, masks let nothing else pass.

    budget left  |<---------- free ---------->|<-- step -->|<---- path ---->|
                  no token can put the end      tokens are    only the known
                  out of reach                  tried one     completion fits
                                                by one

`path` is a completion from a state not long ago; `step` bounds what one token can add to it. A new path is looked
for only where the old one and the tokens since then could be too much. Leaves the search itself to `completion`
and sizes of schemas to `schema_size`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from services.scheduler.constraint.completion import Search, TokenOrder, allowed, first_allowed
from services.scheduler.constraint.matcher import MaskRow, Matcher

_TRIED = 300  # tokens tried in one mask
_SEARCHED = 16  # states looked at for one mask, beyond the known path
_REPAIR = 150  # states looked at for a new path
_MARGIN = 4  # tokens by which a plain token of a string can lengthen the path: a character it left open
_CUTS = 4  # ends of the path that a token may lead to
_SAMPLE = 24  # tokens tried for all words, where many may come


class Ending(Struct, frozen=True):
    """What is known of a grammar's end before the first token. `shortest` is None where none was found."""

    shortest: tuple[int, ...] | None = None
    step: int = 64
    plain_is_harmless: bool = False  # inside an open JSON string plain text never lengthens the path


class BudgetGuard:
    """Follows one matcher. It gives up, and says so in `lost`, where the search finds no completion in time."""

    def __init__(self, ending: Ending, order: TokenOrder) -> None:
        assert ending.shortest is not None
        self._ending = ending
        self._order = order
        self._path: list[int] = list(ending.shortest)
        self._loud = 0  # tokens since the path was right that may have added a step each
        self._quiet = False  # and others, that stay in one text and add next to nothing
        self._after: dict[int, list[int]] = {}  # the path that each token of the last mask was kept for
        self.lost = False

    @property
    def needed(self) -> int:
        """Tokens of the known completion."""
        return len(self._path)

    def fork(self) -> BudgetGuard:
        copy = BudgetGuard(self._ending, self._order)
        copy._path, copy._after = list(self._path), dict(self._after)
        copy._loud, copy._quiet, copy.lost = self._loud, self._quiet, self.lost
        return copy

    def follow(self, ids: Sequence[int], *, forced: bool = False) -> None:
        """The matcher took these tokens; `forced` ones every completion begins with."""
        count = len(ids)
        known = self._after.get(ids[0]) if count == 1 else None
        if known is not None:
            self._path = known
        elif not self._stale and list(ids) == self._path[:count]:
            del self._path[:count]
        elif forced:
            self._quiet = True
        else:
            quiet = sum(self._order.quiet[token] for token in ids) if self._ending.plain_is_harmless else 0
            self._loud += count - quiet
            self._quiet |= quiet > 0
        self._after = {}

    @property
    def _stale(self) -> bool:
        return self._quiet or self._loud > 0

    def restrict(self, matcher: Matcher, budget: int, row: MaskRow) -> None:
        """Take from `row` what would not leave room for an end; `budget` counts the token to be sampled."""
        step = self._ending.step
        reach = len(self._path) + (self._loud + 1) * step + self._quiet * _MARGIN
        if self.lost or budget > reach or matcher.is_stopped:
            return
        if self._stale and not self._repair(matcher, budget):
            return
        if budget - 1 >= len(self._path) + step:
            return
        keep = self._safe(matcher, budget, row)
        row[:] = 0
        ids = np.array(keep, np.int64)
        np.bitwise_or.at(row.view(np.uint32), ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))

    def _repair(self, matcher: Matcher, budget: int) -> bool:
        """A path from the present state: an end of the old one where it still leads to an end, or a new one."""
        path = self._shortest_end(matcher, (), len(self._path), len(self._path))
        for discrepancies in (0, 1):
            if path is None or len(path) > budget - 1:
                most = budget + self._ending.step
                new = Search(self._order, _REPAIR).shortest(matcher, most, discrepancies)
                path = path if new is None else new
        if path is None:
            self.lost = True
            return False
        self._path = path
        self._loud, self._quiet = 0, False
        return True

    def _safe(self, matcher: Matcher, budget: int, row: MaskRow) -> list[int]:
        """The tokens after which an end is known to fit; an end token always may come."""
        keep = [token for token in self._order.vocabulary.eos_ids if matcher.is_complete]
        if budget <= 0:
            return keep
        if self._path:
            self._after[self._path[0]] = self._path[1:]
        rest, harmless = self._split(matcher, budget - 1, row)
        keep += harmless
        search = Search(self._order, _SEARCHED)
        for token in self._tried(rest):
            path = self._path_after(matcher, token, budget - 1, search)
            if path is not None:
                self._after[token] = path
        return keep + list(self._after)

    def _split(self, matcher: Matcher, room: int, row: MaskRow) -> tuple[MaskRow, list[int]]:
        """The tokens to try, and those that are harmless: where many fit, they are parts of one open text.

        Of JSON that is known. Elsewhere some words are tried for all of them: where a word among them begins a part
        that does not fit any more, the text is cut.
        """
        in_json = self._ending.plain_is_harmless
        own = row[: self._order.vocabulary.words].view(np.uint32)
        harmless = own & (self._order.plain if in_json else self._order.prose)
        tokens = allowed(harmless.view(np.int32), self._order.vocabulary)
        if len(tokens) <= _TRIED or room < len(self._path) + in_json * _MARGIN:
            return row, []
        sample = () if in_json else tokens[:: len(tokens) // _SAMPLE + 1].tolist()
        if not all(matcher.completes([token, *self._path]) for token in sample):
            return row, []
        return (own & ~harmless).view(np.int32), tokens.tolist()

    def _tried(self, row: MaskRow) -> list[int]:
        """Allowed tokens in the order in which they are tried: the promising ones, then the common ones."""
        first = self._order.candidates(row)
        others = first_allowed(row, self._order.vocabulary, _TRIED).tolist()
        known = {*self._order.vocabulary.eos_ids, *self._after}
        return [token for token in dict.fromkeys([*first, *others]) if token not in known]

    def _path_after(self, matcher: Matcher, token: int, room: int, search: Search) -> list[int] | None:
        """A completion of at most `room` tokens after `token`, if one is known or quickly found."""
        path = self._shortest_end(matcher, (token,), room, _CUTS)
        if path is not None or search.nodes <= 0 or room < 1:
            return path
        after = matcher.fork()
        return search.shortest(after, room, discrepancies=0) if after.advance([token]) else None

    def _shortest_end(self, matcher: Matcher, first: Sequence[int], room: int, cuts: int) -> list[int] | None:
        """The shortest of the last parts of the path that complete the text after `first`."""
        if matcher.completes(first):
            return []
        for cut in range(min(cuts, len(self._path) - 1), -1, -1):
            if len(self._path) - cut <= room and matcher.completes([*first, *self._path[cut:]]):
                return self._path[cut:]
        return None
