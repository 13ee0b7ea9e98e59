"""Turns a request's wishes into SamplingParams: defaults, ranges, seeds, the whole set of stop tokens.

Leaves the shape of bodies to schema and the length of prompts to limits.
"""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Mapping, Sequence

import msgspec

from services.tokenizer import validation
from services.tokenizer.errors import invalid
from services.tokenizer.model_folder import ModelFolder
from services.tokenizer.schema import SamplingFields
from shared import ints
from shared.messages.request import SamplingParams
from shared.stop_regex import MAX_CHARS, MAX_PATTERNS, BadPattern, check_patterns

SEED_MASK = (1 << 63) - 1
GREEDY_BELOW = 1e-6
MAX_TEMPERATURE = 1e4
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024
MAX_ID = (1 << 31) - 1
MAX_BIASES = 4096
MAX_SCORE_BYTES = 16 << 20
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,19}")  # one way to write it: no id twice
_FALLBACK = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class ScoreWishes(msgspec.Struct, frozen=True):
    """Which log-probabilities to report; as in SamplingParams."""

    top: int = -1
    prompt_from: int = -1
    wanted_ids: tuple[int, ...] = ()


class Names(msgspec.Struct, frozen=True):
    """How the endpoint at hand calls our fields, for its error messages."""

    prefix: str = ""
    renamed: Mapping[str, str] = {}

    def __call__(self, field: str) -> str:
        return self.prefix + self.renamed.get(field, field)


class SeedSource:
    """Draws seeds; with a fixed one the whole sequence repeats."""

    def __init__(self, random_seed: int) -> None:
        self._random = random.Random(random_seed) if random_seed else random.SystemRandom()  # noqa: S311 - no secret

    def draw(self) -> int:
        return self._random.getrandbits(63)


def mix(seed: int, index: int) -> int:
    """The seed of choice `index`: the seed itself for the first one (splitmix64 by Steele, Lea and Flood, 2014)."""
    if index == 0:
        return seed
    z = (seed + index * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) & SEED_MASK


def build(
    fields: SamplingFields,
    names: Names,
    model: ModelFolder,
    defaults: Mapping[str, float],
    scores: ScoreWishes,
    max_logprobs: int,
) -> SamplingParams:
    """Checked parameters; `max_tokens` is as wished (or 0) and `seed` is masked, both are settled by the caller.

    Raises ApiError for every number out of range.
    """
    check = validation.in_range
    vocab = model.vocab_size

    def number(name: str, low: float, high: float, *, above: bool = False) -> float:
        value = check(names(name), getattr(fields, name), low, high, above=above)
        return value if value is not None else float(defaults.get(name, _FALLBACK.get(name, 0.0)))

    temperature = number("temperature", 0, MAX_TEMPERATURE)
    bias_ids, bias_values = _logit_bias(fields.logit_bias, names("logit_bias"), vocab)
    check("logprobs", scores.top, -1, max_logprobs)
    return SamplingParams(
        max_tokens=check(names("max_tokens"), fields.max_tokens, 0, float("inf")) or 0,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=number("top_p", 0, 1, above=True),
        top_k=_top_k(fields.top_k, names("top_k"), defaults, vocab),
        min_p=number("min_p", 0, 1),
        seed=(check(names("seed"), fields.seed, -(1 << 63), (1 << 64) - 1) or 0) & SEED_MASK,
        frequency_penalty=number("frequency_penalty", -2, 2),
        presence_penalty=number("presence_penalty", -2, 2),
        repetition_penalty=number("repetition_penalty", 0, 2, above=True),
        min_new_tokens=check(names("min_tokens"), fields.min_tokens, 0, float("inf")) or 0,
        stop_token_ids=_stop_ids(fields, names("stop_token_ids"), model),
        logit_bias_ids=bias_ids,
        logit_bias_values=bias_values,
        logprobs=scores.top,
        prompt_logprobs_from=scores.prompt_from,
        logprob_token_ids=ints.pack(validation.token_ids("token_ids_logprob", scores.wanted_ids, vocab, max_logprobs)),
    )


def stop_strings(fields: SamplingFields, names: Names) -> tuple[str, ...]:
    return validation.strings(names("stop"), fields.stop, MAX_STOPS, MAX_STOP_CHARS)


def stop_patterns(fields: SamplingFields, names: Names) -> tuple[str, ...]:
    """Raises ApiError where a pattern is not valid or could not be searched for in bounded time."""
    patterns = validation.strings(names("stop_regex"), fields.stop_regex, MAX_PATTERNS, MAX_CHARS)
    try:
        check_patterns(patterns)
    except BadPattern as error:
        raise invalid(f"{names('stop_regex')} {error}.", names("stop_regex"), "invalid_value") from None
    return patterns


def choices(fields: SamplingFields, names: Names, num_prompts: int, max_batch: int) -> int:
    """How many choices each prompt gets."""
    n = validation.in_range(names("n"), fields.n, 1, float("inf")) or 1
    if n * num_prompts > max_batch:
        raise invalid(
            f"{num_prompts} prompts with n = {n} make more than {max_batch} requests.", names("n"), "out_of_range"
        )
    return n


def check_score_size(params: SamplingParams, prompt_tokens: int, param: str) -> None:
    """Scores of one request travel in one message; refuse what would not fit."""
    width = 2 * max(params.logprobs, 0) + ints.count(params.logprob_token_ids) + 1
    rows = prompt_tokens - params.prompt_logprobs_from if params.prompt_logprobs_from >= 0 else 0
    if rows * width * ints.ITEM_BYTES > MAX_SCORE_BYTES:
        raise invalid(
            f"{rows} positions with {width} log-probabilities each are too many at once.", param, "out_of_range"
        )


def _top_k(value: int | None, name: str, defaults: Mapping[str, float], vocab: int) -> int:
    if value is None:
        default = int(defaults.get("top_k", -1))
        return min(default, vocab) if default > 0 else -1
    if value != -1 and not 1 <= value <= vocab:
        raise invalid(f"{name} must be -1 (all) or from 1 to {vocab}, not {str(value)[:40]}.", name, "out_of_range")
    return value


def _stop_ids(fields: SamplingFields, name: str, model: ModelFolder) -> tuple[int, ...]:
    given = validation.token_ids(name, fields.stop_token_ids or (), MAX_ID + 1, MAX_STOP_IDS)
    wished = [token for token in given if token < model.vocab_size]  # others are never sampled: nothing to do for them
    own: Sequence[int] = () if fields.ignore_eos else model.eos_ids
    return tuple(sorted({*wished, *own}))


def _logit_bias(bias: Mapping[str, float] | None, name: str, vocab: int) -> tuple[bytes, bytes]:
    if not bias:
        return b"", b""
    ids: list[int] = []
    for key, value in bias.items():
        if not _INTEGER.fullmatch(key):
            raise invalid(f"{name} has the key {key[:40]!r}, which is no token id.", name, "invalid_value")
        ids.append(int(key))
        validation.in_range(name, value, -100, 100)
    validation.token_ids(name, ids, vocab, MAX_BIASES)
    return ints.pack(ids), array("f", bias.values()).tobytes()
