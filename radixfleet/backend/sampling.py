"""How one generation is sampled: every wish optional, merged from the call and the run.

Leaves ranges to the server. Values are copied on the way in, so nothing of the caller's is shared or changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

SCORE_FIELDS = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")


@dataclass(frozen=True)
class Sampling:
    """`sampling_params` of one request, and which scores come back. None: not said here."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stop_regex: tuple[str, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    sampling_seed: int | None = None
    logit_bias: tuple[tuple[str, float], ...] | None = None
    regex: str | None = None
    json_schema: str | None = None
    ebnf: str | None = None
    lark: str | None = None
    structural_tag: str | None = None
    xml_schema: str | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None

    def over(self, defaults: Sampling) -> Sampling:
        """These wishes, and the defaults where nothing was said."""
        said = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(defaults, **{name: value for name, value in said.items() if value is not None})

    @property
    def repeatable(self) -> bool:
        """Whether asking twice gives the same answer: greedy, or sampled with a seed."""
        return self.temperature == 0 or self.top_k == 1 or self.sampling_seed is not None

    def wire(self) -> dict[str, Any]:
        """`sampling_params` as JSON values."""
        said: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None or field.name in SCORE_FIELDS:
                continue
            said[field.name] = list(value) if isinstance(value, tuple) else value
        if self.logit_bias is not None:
            said["logit_bias"] = dict(self.logit_bias)
        return said

    def score_wire(self) -> dict[str, Any]:
        """The fields beside `sampling_params` that ask for log-probabilities."""
        said = {name: getattr(self, name) for name in SCORE_FIELDS}
        return {name: value for name, value in said.items() if value is not None}


def texts(value: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """One string or several, as a tuple of our own."""
    if value is None:
        return None
    return (value,) if isinstance(value, str) else tuple(value)


def schema_text(schema: Any) -> str | None:
    """A JSON schema as text: given as text, as a mapping, or as a class with `model_json_schema`."""
    if schema is None or isinstance(schema, str):
        return schema
    describe = getattr(schema, "model_json_schema", None)
    return json.dumps(describe() if callable(describe) else schema, ensure_ascii=False)


def bias_items(bias: Mapping[Any, float] | None) -> tuple[tuple[str, float], ...] | None:
    return None if bias is None else tuple((str(token), float(value)) for token, value in bias.items())
