"""Prompts become GenerateRequests: room for the answer, one request per choice, names to abort them by.

Leaves wishes to sampling and sending to frontend.
"""

from __future__ import annotations

import hashlib
import uuid
from array import array
from collections.abc import Sequence

import msgspec

from services.tokenizer import sampling, validation
from services.tokenizer.errors import invalid, too_long
from services.tokenizer.sampling import SeedSource
from services.tokenizer.streams import Group
from shared import ints
from shared.messages.request import Constraint, GenerateRequest, SamplingParams


class Prompt(msgspec.Struct, kw_only=True):
    """One prompt, ready to be sent n times. `wished` is max_tokens as the client gave it, None if absent."""

    ids: array[int]
    params: SamplingParams
    wished: int | None
    default_max_tokens: int | None  # None: what is left of the context
    rid: str
    names: tuple[str, ...] = ()
    n: int = 1
    seeded: bool = False
    stop_strings: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    namespace: bytes = b""
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    stream: bool = False
    priority: int = 0
    constraint: Constraint | None = None
    pin: str = ""
    pin_s: float = 0.0
    thinking_end_id: int = -1  # the constraint begins after this token


def new_rid() -> str:
    return uuid.uuid4().hex


def settle_length(prompt: Prompt, limit: int, strict: bool, prompt_param: str, max_param: str) -> None:
    """Give the prompt its max_tokens. Raises ApiError where it is empty or does not fit into `limit` tokens."""
    length = len(prompt.ids)
    if not length:
        raise invalid("The prompt is empty.", prompt_param, "empty_prompt")
    wished = prompt.wished if prompt.wished is not None else prompt.default_max_tokens
    left = limit - length
    if left < 0 or (left == 0 and wished != 0):
        raise too_long(length, limit, prompt_param)
    if strict and wished is not None and wished > left:
        raise invalid(
            f"{length} prompt tokens and {max_param} = {wished} exceed the maximum context length of {limit} tokens.",
            max_param,
            "context_length_exceeded",
        )
    if wished is not None and prompt.params.min_new_tokens > wished:
        raise invalid(
            f"At least {prompt.params.min_new_tokens} tokens were asked for, but {max_param} = {wished}.",
            max_param,
            "invalid_value",
        )
    max_tokens = left if wished is None else min(wished, left)
    prompt.params = msgspec.structs.replace(
        prompt.params, max_tokens=max_tokens, min_new_tokens=min(prompt.params.min_new_tokens, max_tokens)
    )
    sampling.check_score_size(prompt.params, length, prompt_param)


def make_group(prompts: Sequence[Prompt], seeds: SeedSource) -> Group:
    """Every choice of every prompt, prompt by prompt."""
    group = Group()
    for prompt in prompts:
        seed = prompt.params.seed if prompt.seeded else seeds.draw()
        ids = ints.pack(prompt.ids)
        family = new_rid() if prompt.n > 1 else ""
        for choice in range(prompt.n):
            request = GenerateRequest(
                request_id=f"{prompt.rid}.{family[:12]}.{choice}" if family else prompt.rid,
                frontend_id="",
                prompt_ids=ids,
                sampling=msgspec.structs.replace(prompt.params, seed=sampling.mix(seed, choice)),
                namespace=prompt.namespace,
                constraint=prompt.constraint,
                stop_strings=prompt.stop_strings,
                stop_regex=prompt.stop_regex,
                no_stop_trim=prompt.no_stop_trim,
                skip_special_tokens=prompt.skip_special_tokens,
                spaces_between_special_tokens=prompt.spaces_between_special_tokens,
                stream=prompt.stream,
                priority=prompt.priority,
                group_id=family,
                choice_index=choice,
                pin=prompt.pin,
                pin_s=prompt.pin_s,
                thinking_end_id=prompt.thinking_end_id,
            )
            group.add(request, (prompt.rid, *prompt.names))
    return group


def namespace(extra_key: str | None, cache_salt: str | None) -> bytes:
    """A short key that separates cached prefixes; empty where the client asked for no separation."""
    if not extra_key and not cache_salt:
        return b""
    parts = [validation.bounded_key("extra_key", extra_key), validation.bounded_key("cache_salt", cache_salt)]
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=16).digest()


def item_rids(
    rid: str | list[str] | None, count: int, batch: bool, prefix: str = ""
) -> list[tuple[str, tuple[str, ...]]]:
    """(id, further names) of each prompt of a request: one id given for a batch names all of its items."""
    if isinstance(rid, list):
        validation.per_item("rid", rid, count, "")
        if len(set(rid)) != len(rid):
            raise invalid("rid holds the same id twice.", "rid", "duplicate_id")
        return [(validation.request_id(item), ()) for item in rid]
    base = validation.request_id(rid) if rid is not None else new_rid()
    names = (prefix + base,) if prefix else ()
    if not batch:
        return [(base, names)]
    return [(f"{base}_{index}", (base, *names)) for index in range(count)]
