"""A shortest completion: few tokens that take a matcher from where it is to a text that satisfies its grammar.

The search runs over copies of the matcher. First comes the path that takes, at every choice, the token which
most likely closes something; then limited discrepancy search (Harvey and Ginsberg, 1995) looks at the paths that
differ from it once, twice, ... Where the first path finds no end, short paths come first, and those whose masks
are new: masks that repeat lead in circles. Forced tokens are no choice. Leaves the use of it to `budget`.
"""

from __future__ import annotations

import heapq
import itertools
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from services.scheduler.constraint.matcher import MaskRow, Matcher
from services.scheduler.constraint.vocabulary import WORD_BITS, Vocabulary

_QUOTE = b'"'
_BRACKETS = frozenset(b"]})")
_MARKS = b"@.:,-/=<>;'` \n"  # what often ends one part of a text and begins the next, in this order
_ATOMS = (b'""', b"0", b"[]", b"{}", b"null", b"true")
_WIDTH = 10  # choices looked at in one state
_LONG = 512
DEAD_END = "NoExtension"  # the engine's word for a state from which no text can be completed
_DIVE = 96  # states in which the first path must find an end
_NOT_PLAIN = frozenset(range(0x20)) | frozenset(b'"\\\x7f')
_PROSE = (
    frozenset(b" \n.,;:!?'-()")
    | frozenset((string.ascii_letters + string.digits).encode())
    | frozenset(range(0x80, 256))
)
_NOT_QUIET = _NOT_PLAIN | frozenset(b"[]{},:")


class TokenOrder:
    """Which tokens are tried first; one per vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        texts = [(token, text) for token, text in enumerate(vocabulary.all_bytes) if text]
        by_length = sorted(texts, key=lambda pair: -len(pair[1]))
        closing = _BRACKETS.union(_QUOTE)
        ends = [(t, b) for t, b in by_length if closing.issuperset(b)]
        quotes = _ids([(t, b) for t, b in ends if b.startswith(_QUOTE)])
        brackets = _ids([(t, b) for t, b in ends if b[0] in _BRACKETS])
        atoms = _ids(sorted(((t, b) for t, b in texts if b in _ATOMS), key=lambda pair: _ATOMS.index(pair[1])))
        digits = _ids(sorted(((t, b) for t, b in texts if len(b) == 1 and b.isdigit()), key=lambda pair: -pair[1][0]))
        marks = _ids(
            sorted(((t, b) for t, b in texts if len(b) == 1 and b in _MARKS), key=lambda p: _MARKS.index(p[1]))
        )
        commas = _ids([(t, b) for t, b in texts if b in (b",", b":", b',"')])
        long = _ids([(t, b) for t, b in by_length if b.isalnum()][:_LONG])
        short = _ids(sorted(texts, key=lambda pair: len(pair[1]))[:_LONG])
        alone = _ids([(t, b) for t, b in texts if len(b) == 1 and b.isalpha()])
        self._letters = _ids([(t, b) for t, b in texts if b in (b"a", b"q")])
        # inside a text brackets are text, and a quote ends it; outside a quote may begin one
        self._in_text = ((quotes, 2), (marks, 4), (long, 1), (digits, 1), (short, 2))
        self._outside = (
            (brackets, 2),
            (commas, 1),
            (atoms, 2),
            (digits, 1),
            (quotes, 1),
            (marks, 1),
            (long, 1),
            (short, 1),
            (alone, 3),
        )

    @cached_property
    def plain(self) -> NDArray[np.uint32]:
        """A mask row of the tokens that can stand inside a JSON string and leave it open."""
        row = np.zeros(self.vocabulary.words * WORD_BITS, np.uint8)
        for token, text in enumerate(self.vocabulary.all_bytes):
            row[token] = bool(text) and _NOT_PLAIN.isdisjoint(text)
        return np.packbits(row, bitorder="little").view(np.uint32)

    @cached_property
    def prose(self) -> NDArray[np.uint32]:
        """A mask row of the tokens of whole characters that are only words and what stands between words."""
        row = np.zeros(self.vocabulary.words * WORD_BITS, np.uint8)
        for token, text in enumerate(self.vocabulary.all_bytes):
            row[token] = bool(text) and _PROSE.issuperset(text) and (text.isascii() or _is_utf8(text))
        return np.packbits(row, bitorder="little").view(np.uint32)

    @cached_property
    def quiet(self) -> bytes:
        """One byte per id, 1 where the token can neither open nor separate anything in JSON."""
        return bytes(bool(text) and _NOT_QUIET.isdisjoint(text) for text in self.vocabulary.all_bytes)

    def candidates(self, row: MaskRow) -> list[int]:
        """Up to a handful of allowed tokens, the most promising first."""
        found: dict[int, None] = {}
        groups = self._in_text if is_set(row, self._letters).all() else self._outside
        for group, most in groups:
            for token in group[is_set(row, group)][:most]:
                found[int(token)] = None
        if len(found) < 3:
            for token in first_allowed(row, self.vocabulary, _WIDTH - len(found)):
                found[int(token)] = None
        return [token for token in found if token not in self.vocabulary.eos_ids][:_WIDTH]


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def allowed(row: MaskRow, vocabulary: Vocabulary) -> NDArray[np.int64]:
    """The ids whose bits are set, ascending."""
    bits = np.unpackbits(row[: vocabulary.words].view(np.uint8), bitorder="little", count=vocabulary.size)
    return np.flatnonzero(bits)


def first_allowed(row: MaskRow, vocabulary: Vocabulary, most: int) -> NDArray[np.int64]:
    """As `allowed`, but `most` of them at most: the lowest."""
    words = np.flatnonzero(row[: vocabulary.words])[:most]
    bits = np.unpackbits(row[words].view(np.uint8), bitorder="little").reshape(len(words), WORD_BITS)
    where, bit = np.nonzero(bits)
    ids = words[where] * WORD_BITS + bit
    return ids[ids < vocabulary.size][:most]


def is_set(row: MaskRow, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """One bool for each of `ids`."""
    bits: NDArray[np.uint32] = (row.view(np.uint32)[ids >> 5] >> (ids & 31).astype(np.uint32)) & 1
    return bits.astype(np.bool_)


class Search:
    """Looks at `nodes` states at most, over all its calls.

    `broken`: why a matcher gave up on a token that it had allowed, where one did.
    """

    def __init__(self, order: TokenOrder, nodes: int) -> None:
        self.nodes = nodes
        self.broken = ""
        self._order = order
        self._row = np.zeros(order.vocabulary.words, np.int32)
        self._best: list[int] | None = None
        self._most = 0

    def shortest(self, matcher: Matcher, most: int, discrepancies: int = 2) -> list[int] | None:
        """The shortest completion found with at most `most` tokens; `matcher` stays as it is."""
        if matcher.is_complete:
            return []
        self._best = None
        self._most = most
        self._walk(matcher.fork(), 0, self.nodes - _DIVE)
        if self._best is None:
            self._rotate(matcher.fork())
        if self._best is None:
            if discrepancies:
                self._spread(matcher.fork())
            return self._best
        for extra in range(1, discrepancies + 1):
            if not self._walk(matcher.fork(), extra, 0):
                break
        return self._best

    def _rotate(self, matcher: Matcher) -> None:
        """One path; where the same mask comes again, the next of its choices is taken: that leaves circles."""
        path: list[int] = []
        seen: Counter[bytes] = Counter()
        for _ in range(min(_DIVE, self.nodes)):
            self.nodes -= 1
            self._row[:] = 0
            choices = self._choices(matcher, path)
            turn = seen[mask := self._row.tobytes()]
            seen[mask] += 1
            children = list(self._children(matcher, path, choices))
            if self._best is not None or not children:
                return
            _, matcher, path = children[turn % len(children)]

    def _spread(self, start: Matcher) -> None:
        """Short paths first; each state with a mask seen before puts its followers one place further back."""
        order = itertools.count()
        todo: list[tuple[int, int, Matcher, list[int]]] = [(0, next(order), start, [])]
        seen: Counter[bytes] = Counter()
        while todo and self.nodes > 0 and self._best is None:
            _, _, matcher, path = heapq.heappop(todo)
            self.nodes -= 1
            self._row[:] = 0
            choices = self._choices(matcher, path)
            mask = self._row.tobytes()
            seen[mask] += 1
            for _, child, longer in self._children(matcher, path, choices):
                heapq.heappush(todo, (len(longer) + seen[mask], next(order), child, longer))

    def _walk(self, start: Matcher, extra: int, reserve: int) -> bool:
        """Depth first until `reserve` states are left. False: no path has more than `extra` choices."""
        todo: list[tuple[Matcher, list[int], int]] = [(start, [], extra)]
        cut = False
        while todo:
            if self.nodes <= max(reserve, 0):
                return False
            matcher, path, left = todo.pop()
            self.nodes -= 1
            choices = self._choices(matcher, path)
            usable = choices if left else choices[:1]
            cut |= len(usable) < len(choices)
            children = list(self._children(matcher, path, usable))
            # the last one is looked at first
            todo += [(child, longer, left - (rank > 0)) for rank, child, longer in reversed(children)]
        return cut

    def _children(
        self, matcher: Matcher, path: list[int], choices: list[Sequence[int]]
    ) -> Iterator[tuple[int, Matcher, list[int]]]:
        """(rank, matcher, path) after each choice that may still become the best; notes those that are complete."""
        for rank, ids in enumerate(choices):
            if len(path) + len(ids) > self._most:
                continue
            child = matcher.fork()
            if not child.advance(ids):
                self._note(child)
                continue
            if child.is_complete:
                self._best = [*path, *ids]
                self._most = len(self._best) - 1
            else:
                yield rank, child, [*path, *ids]

    def _choices(self, matcher: Matcher, path: list[int]) -> list[Sequence[int]]:
        """What may come next, the most promising first; nothing where no better completion can follow."""
        if len(path) >= self._most:
            return []
        forced = matcher.forced_tokens()
        if forced:
            return [forced]
        if not matcher.fill_mask(self._row):
            self._note(matcher)
            return []
        return [(token,) for token in self._order.candidates(self._row)]

    def _note(self, matcher: Matcher) -> None:
        if not matcher.error.startswith(DEAD_END):
            self.broken = self.broken or matcher.error


def _ids(pairs: Sequence[tuple[int, bytes]]) -> NDArray[np.int64]:
    return np.array([token for token, _ in pairs], np.int64)
