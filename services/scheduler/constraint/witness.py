"""A completion for JSON schemas whose patterns only match somewhere in a string: `{"pattern": "abc"}`.

There no mask shows what is missing, so that a search would guess letters. A shortest text of each pattern by itself is
written where a string cannot end without it. Leaves all other schemas to `completion`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from services.scheduler.constraint.completion import Search, TokenOrder, is_set
from services.scheduler.constraint.errors import BadSource
from services.scheduler.constraint.limits import Limits
from services.scheduler.constraint.llguidance_matcher import LLGuidanceMatcher
from services.scheduler.constraint.matcher import Matcher
from services.scheduler.constraint.schema_check import walk
from services.scheduler.constraint.sources import Options, read_source

_PATTERNS = 8
_LONGEST = 64  # tokens of one word
_STATES = 192
_QUOTE = b'"'


def completion_by_witness(schema: Any, matcher: Matcher, order: TokenOrder, limits: Limits) -> list[int] | None:
    """The tokens of a whole text, a short one; None where this way finds none."""
    quote = order.vocabulary.all_bytes.index(_QUOTE)
    words = [[*word, quote] for word in itertools.islice(_words(schema, order, limits), _PATTERNS)]
    row, path, state = np.zeros(order.vocabulary.words, np.int32), list[int](), matcher.fork()
    for _ in range(_STATES if words else 0):
        if state.is_complete:
            return path
        ids: Sequence[int] = state.forced_tokens()
        if not ids:
            if not state.fill_mask(row):
                return None
            may_end = is_set(row, np.array([quote])).all()
            ids = (() if may_end else _fitting(words, state)) or order.candidates(row)[:1]
        if not ids or not state.advance(ids):
            return None
        path += ids
    return None


def _words(schema: Any, order: TokenOrder, limits: Limits) -> Iterator[list[int]]:
    """What satisfies each pattern, as it is written inside of quotes."""
    patterns = {part["pattern"]: None for _, part, _ in walk(schema) if isinstance(part, dict) and "pattern" in part}
    for pattern in patterns:
        try:
            grammar = read_source("regex", pattern, Options(), limits, order.vocabulary)
        except BadSource:
            continue
        matcher = LLGuidanceMatcher.build(grammar.text, order.vocabulary, limits)
        ids = None if matcher.error else Search(order, limits.search_nodes).shortest(matcher, _LONGEST)
        if ids:
            text = order.vocabulary.decode(ids).decode("utf-8", "replace")
            yield list(order.vocabulary.encode(json.dumps(text, ensure_ascii=False)[1:-1]))


def _fitting(words: list[list[int]], state: Matcher) -> Sequence[int]:
    """A word after which the string may end, without the quote that ends it."""
    return next((word[:-1] for word in words if state.fork().advance(word)), ())
