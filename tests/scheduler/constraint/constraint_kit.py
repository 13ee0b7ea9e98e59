"""Grammars over the real small model's vocabulary, and the three ways in which a table of texts is checked."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from radixfleet.models import resolve
from services.scheduler.constraint.canonical import canonical
from services.scheduler.constraint.completion import Search, TokenOrder, allowed
from services.scheduler.constraint.limits import Limits
from services.scheduler.constraint.llguidance_matcher import LLGuidanceMatcher
from services.scheduler.constraint.matcher import Matcher
from services.scheduler.constraint.sources import Options, explain_error, read_source
from services.scheduler.constraint.vocabulary import Vocabulary

LIMITS = Limits()
SPLIT = "¦"
FREE_TOKENS = 12


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary.load(resolve(None))


@cache
def token_order() -> TokenOrder:
    return TokenOrder(vocabulary())


@cache
def byte_tokens() -> dict[int, int]:
    """byte -> the token that stands for this byte alone."""
    return {text[0]: token for token, text in enumerate(vocabulary().all_bytes) if len(text) == 1}


def build(kind: Any, source: str, **options: bool) -> LLGuidanceMatcher:
    """The matcher of a source. Raises BadSource as the compiling process would."""
    grammar = read_source(kind, canonical(kind, source), Options(**options), LIMITS, vocabulary())
    matcher = LLGuidanceMatcher.build(grammar.text, vocabulary(), LIMITS)
    if matcher.error:
        raise explain_error(kind, grammar, matcher.error)
    return matcher


def accepts(matcher: Matcher, text: str) -> bool:
    trial = matcher.fork()
    return trial.advance(vocabulary().encode(text)) and trial.is_complete


def mask(matcher: Matcher) -> np.ndarray:
    """Ids allowed now."""
    row = np.zeros(vocabulary().words, np.int32)
    assert matcher.fill_mask(row), matcher.error
    return allowed(row, vocabulary())


def check_accepted(matcher: Matcher, text: str) -> None:
    """The mask admits every prefix, in the tokenizer's spelling and byte by byte."""
    trial = matcher.fork()
    for token in vocabulary().encode(text):
        assert token in mask(trial), (text, vocabulary().all_bytes[token])
        assert trial.advance([token])
    assert trial.is_complete, text
    assert set(vocabulary().eos_ids) <= set(mask(trial).tolist()), text
    spelled = matcher.fork()
    for byte in text.encode():
        forced = spelled.forced_tokens()
        if not forced:
            assert byte_tokens()[byte] in mask(spelled), (text, byte)
        assert spelled.advance([byte_tokens()[byte]]), (text, byte)
    assert spelled.is_complete, text


def check_refused(matcher: Matcher, text: str) -> None:
    """`good¦bad`: after the good part no token begins with the first bad byte; without a bad part it must not end."""
    good, _, bad = text.partition(SPLIT)
    trial = matcher.fork()
    for byte in good.encode():
        assert trial.advance([byte_tokens()[byte]]), (text, byte)
    tokens = mask(trial)
    if not bad:
        assert not trial.is_complete, text
        assert not set(vocabulary().eos_ids) & set(tokens.tolist()), text
        return
    wrong = bad.encode()[0]
    starts = {vocabulary().all_bytes[token][0] for token in tokens if vocabulary().all_bytes[token]}
    assert wrong not in starts, text
    assert not trial.advance([byte_tokens()[wrong]]), text


def check_sampled(matcher: Matcher, judge: Callable[[str], bool], seeds: int = 50) -> None:
    """Whatever is drawn from the masks, the finished text satisfies the judge."""
    finished = 0
    for seed in range(seeds):
        text = sample(matcher, np.random.default_rng(seed))
        if text is not None:
            finished += 1
            assert judge(text), (seed, text)
    assert finished >= seeds // 2


def sample(matcher: Matcher, rng: np.random.Generator) -> str | None:
    """Some tokens drawn evenly from the masks, then a shortest way to the end; None where none was found."""
    trial = matcher.fork()
    out: list[int] = []
    while len(out) < FREE_TOKENS and not trial.is_stopped:
        forced = trial.forced_tokens()
        ids = forced or [int(rng.choice(mask(trial)))]
        if ids[0] in vocabulary().eos_ids:
            break
        assert trial.advance(ids), (out, ids, trial.error)
        out += ids
    rest = Search(token_order(), 300).shortest(trial, 64)
    return None if rest is None else vocabulary().decode([*out, *rest]).decode()
