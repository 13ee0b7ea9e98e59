"""A shortest completion: few tokens that take a matcher from where it is to a text that satisfies its grammar.

The search is limited discrepancy search (Harvey and Ginsberg, 1995) over copies of the matcher: first the path
that takes the token which most likely closes something at every choice, then the paths that differ from it once,
twice, ...; forced tokens are no choice. Leaves the use of it to `budget`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from services.scheduler.constraint.matcher import MaskRow, Matcher
from services.scheduler.constraint.vocabulary import WORD_BITS, Vocabulary

_QUOTE = b'"'
_BRACKETS = frozenset(b"]})")
_MARKS = frozenset(b"'`<>;.,:@-/ \n")
_ATOMS = (b'""', b"0", b"[]", b"{}", b"null", b"true")
_WIDTH = 8  # choices looked at in one state
_LONG = 512
_DIVE = 96
_LIMITS = (4, 8, 16, 32, 64, 128)
_PLAIN_FORBIDDEN = frozenset(range(0x20)) | frozenset(b'"\\\x7f')


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
        marks = _ids([(t, b) for t, b in texts if len(b) <= 2 and _MARKS.issuperset(b)])
        commas = _ids([(t, b) for t, b in texts if b in (b",", b":", b',"')])
        long = _ids([(t, b) for t, b in by_length if b.isalnum()][:_LONG])
        short = _ids(sorted(texts, key=lambda pair: len(pair[1]))[:_LONG])
        self._letters = _ids([(t, b) for t, b in texts if b in (b"a", b"q")])
        # inside a text brackets are text, and a quote ends it; outside a quote may begin one
        self._in_text = ((quotes, 2), (marks, 2), (long, 1), (digits, 1), (short, 2))
        self._outside = (
            (brackets, 2),
            (commas, 1),
            (atoms, 2),
            (digits, 1),
            (quotes, 1),
            (marks, 1),
            (long, 1),
            (short, 1),
        )

    @cached_property
    def plain(self) -> NDArray[np.uint32]:
        """A mask row of the tokens that can stand inside a JSON string and leave it open."""
        row = np.zeros(self.vocabulary.words * WORD_BITS, np.uint8)
        for token, text in enumerate(self.vocabulary.all_bytes):
            row[token] = bool(text) and not any(byte in _PLAIN_FORBIDDEN for byte in text)
        return np.packbits(row, bitorder="little").view(np.uint32)

    def candidates(self, row: MaskRow) -> list[int]:
        """Up to a handful of allowed tokens, the most promising first."""
        found: dict[int, None] = {}
        groups = self._in_text if is_set(row, self._letters).all() else self._outside
        for group, most in groups:
            for token in group[is_set(row, group)][:most]:
                found[int(token)] = None
        if len(found) < 3:
            for token in allowed(row, self.vocabulary)[: _WIDTH - len(found)]:
                found[int(token)] = None
        return [token for token in found if token not in self.vocabulary.eos_ids][:_WIDTH]


def allowed(row: MaskRow, vocabulary: Vocabulary) -> NDArray[np.int64]:
    """The ids whose bits are set, ascending."""
    bits = np.unpackbits(row[: vocabulary.words].view(np.uint8), bitorder="little", count=vocabulary.size)
    return np.flatnonzero(bits)


def is_set(row: MaskRow, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """One bool for each of `ids`."""
    bits: NDArray[np.uint32] = (row.view(np.uint32)[ids >> 5] >> (ids & 31).astype(np.uint32)) & 1
    return bits.astype(np.bool_)


class Search:
    """Looks at `nodes` states at most, over all its calls."""

    def __init__(self, order: TokenOrder, nodes: int) -> None:
        self.nodes = nodes
        self._order = order
        self._row = np.zeros(order.vocabulary.words, np.int32)
        self._best: list[int] | None = None
        self._most = 0

    def shortest(self, matcher: Matcher, most: int, discrepancies: int = 2) -> list[int] | None:
        """The shortest completion found with at most `most` tokens; `matcher` stays as it is.

        The first path is followed for `_DIVE` states. Where that finds no end, its choices may repeat for ever,
        and growing limits take its place.
        """
        if matcher.is_complete:
            return []
        self._best = None
        self._most = most
        self._walk(matcher.fork(), 0, self.nodes - _DIVE)
        limits = [] if self._best is not None else [limit for limit in _LIMITS if limit < most]
        for left, limit in zip(range(len(limits) + 1, 0, -1), [*limits, most], strict=True):
            reserve = self.nodes - self.nodes // left
            for extra in range(1, discrepancies + 1):
                self._most = min(limit, len(self._best) - 1 if self._best is not None else most)
                if not self._walk(matcher.fork(), extra, reserve):
                    break
            if self._best is not None:
                break
        return self._best

    def _walk(self, start: Matcher, extra: int, reserve: int) -> bool:
        """Depth first until `reserve` states are left. False: no path has more than `extra` choices."""
        todo: list[tuple[Matcher, list[int], int]] = [(start, [], extra)]
        cut = False
        while todo:
            if self.nodes <= max(reserve, 0):
                return False
            matcher, path, left = todo.pop()
            self.nodes -= 1
            children = []
            for rank, ids in enumerate(self._choices(matcher, path)):
                if rank and not left:
                    cut = True
                    break
                if len(path) + len(ids) > self._most:
                    continue
                child = matcher.fork()
                if not child.advance(ids):
                    continue
                if child.is_complete:
                    self._best = [*path, *ids]
                    self._most = len(self._best) - 1
                else:
                    children.append((child, [*path, *ids], left - (rank > 0)))
            todo += reversed(children)  # the last one is looked at first
        return cut

    def _choices(self, matcher: Matcher, path: list[int]) -> list[Sequence[int]]:
        """What may come next, the most promising first; nothing where no better completion can follow."""
        if len(path) >= self._most:
            return []
        forced = matcher.forced_tokens()
        if forced:
            return [forced]
        if not matcher.fill_mask(self._row):
            return []
        return [(token,) for token in self._order.candidates(self._row)]


def _ids(pairs: Sequence[tuple[int, bytes]]) -> NDArray[np.int64]:
    return np.array([token for token, _ in pairs], np.int64)
