"""A worker without a model: the next token is a hash of all tokens before it. Leaves pages to fake_engine."""

from __future__ import annotations

import numpy as np

from shared.messages.request import SamplingParams

VOCAB = 50_000
_MASK = (1 << 64) - 1
EMPTY = 0x9E3779B97F4A7C15
"""The hash of no tokens."""


def chain(before: int, token: int) -> int:
    """The hash of a sequence from the hash of all but its last token."""
    mixed = ((before ^ (token + 1)) * 0xBF58476D1CE4E5B9) & _MASK
    return mixed ^ (mixed >> 29)


def sampled(state: int) -> int:
    return (state >> 7) % VOCAB


def sampled_under(state: int, mask: bytes) -> int:
    """The allowed token with the highest hash; -1 where none is allowed. `mask` is one packed row."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little", count=VOCAB)
    allowed = np.flatnonzero(bits).astype(np.uint64)
    if not len(allowed):
        return -1
    mixed = (np.uint64(state) ^ (allowed + np.uint64(1))) * np.uint64(0xBF58476D1CE4E5B9)  # as in chain
    return int(allowed[np.argmax(mixed ^ (mixed >> np.uint64(29)))])


def choose(state: int, mask: bytes | None, sampling: SamplingParams) -> int:
    """The next token; -1 where the mask allows none."""
    return sampled(state) if mask is None else sampled_under(state, mask)


def logprob(state: int, token: int) -> float:
    """What the fake says a token's score is after a sequence with this hash; exact in float32."""
    return -(((state >> 11) + token) % 4096) / 64


def hash_of(tokens: list[int]) -> int:
    state = EMPTY
    for token in tokens:
        state = chain(state, token)
    return state


def generate(prompt: list[int], max_tokens: int, stops: tuple[int, ...] = (), min_tokens: int = 0) -> list[int]:
    """What a request must answer, however it was scheduled."""
    state = hash_of(prompt)
    output: list[int] = []
    while len(output) < max_tokens:
        token = sampled(state)
        output.append(token)
        if token in stops and len(output) > min_tokens:
            break
        state = chain(state, token)
    return output


def expected_scores(tokens: list[int], start: int, end: int) -> list[float]:
    """Scores of the tokens at positions start .. end - 1, each given all before it."""
    state = EMPTY
    scores = []
    for position, token in enumerate(tokens[:end]):
        if position >= start:
            scores.append(logprob(state, token) if position else float("nan"))
        state = chain(state, token)
    return scores
