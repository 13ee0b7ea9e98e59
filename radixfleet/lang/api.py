"""What a program is written with. Every function here makes an expression; nothing is sent anywhere yet."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from radixfleet.backend.sampling import Sampling, bias_items, schema_text, texts
from radixfleet.lang import reasoning
from radixfleet.lang.choices import ChoicesMethod, token_length_normalized
from radixfleet.lang.ir import (
    REGEX_BOOL,
    REGEX_FLOAT,
    REGEX_INT,
    REGEX_STR,
    ApiCall,
    Expr,
    Gen,
    Known,
    Reasoning,
    RoleBegin,
    RoleEnd,
    Select,
    expressions_in,
    is_spoken,
)
from radixfleet.lang.ir import Sequence as ExprSequence

_NUMBER_STOPS = (" ", "\n")
_DTYPES: dict[Any, tuple[str, tuple[str, ...]]] = {
    int: (REGEX_INT, _NUMBER_STOPS),
    float: (REGEX_FLOAT, _NUMBER_STOPS),
    bool: (REGEX_BOOL, ()),
    str: (REGEX_STR, ()),
}
_DTYPES |= {dtype.__name__: _DTYPES[dtype] for dtype in list(_DTYPES)}


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    regex: str | None = None,
    json_schema: Any = None,
    *,
    ebnf: str | None = None,
    lark: str | None = None,
    structural_tag: Any = None,
    xml_schema: Any = None,
    repetition_penalty: float | None = None,
    seed: int | None = None,
    logit_bias: Mapping[Any, float] | None = None,
    api_url: str | Callable[..., Any] | None = None,
    params: Mapping[str, Any] | None = None,
    api_headers: Mapping[str, Any] | None = None,
    api_timeout: float | None = None,
    api_max_bytes: int | None = None,
) -> Expr:
    """Text the model writes; whatever is None comes from run().

    With `choices` one of them is selected. With `api_url` (an address on the allow-list, or a Python function) the
    text comes from there: `params` may mention other expressions, and `max_tokens` cuts the answer.
    Raises ValueError for wishes that exclude each other.
    """
    if api_url is not None:
        if callable(api_url) and (api_headers or api_timeout is not None or api_max_bytes is not None):
            raise ValueError("api_headers, api_timeout and api_max_bytes are for addresses, not for Python functions")
        return ApiCall(name, api_url, params or {}, api_headers or {}, max_tokens, api_timeout, api_max_bytes)
    if params is not None:
        raise ValueError("gen(params=...) needs api_url=...")
    if choices is not None:
        return select(name, choices, 0.0 if temperature is None else temperature, choices_method)
    stops = texts(stop)
    if dtype is not None:
        regex, stops = _typed(dtype, regex, json_schema, ebnf, stops)
    sampling = Sampling(
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens,
        n=n,
        stop=stops,
        stop_token_ids=None if stop_token_ids is None else tuple(stop_token_ids),
        stop_regex=texts(stop_regex),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        repetition_penalty=repetition_penalty,
        ignore_eos=ignore_eos,
        sampling_seed=seed,
        logit_bias=bias_items(logit_bias),
        regex=regex,
        json_schema=schema_text(json_schema),
        ebnf=ebnf,
        lark=lark,
        structural_tag=schema_text(structural_tag),
        xml_schema=schema_text(xml_schema),
        return_logprob=return_logprob,
        logprob_start_len=logprob_start_len,
        top_logprobs_num=top_logprobs_num,
        return_text_in_logprobs=return_text_in_logprobs,
    )
    _refuse_values(sampling)
    return Gen(name, sampling)


def gen_int(name: str | None = None, max_tokens: int | None = None, **wishes: Any) -> Expr:
    """A whole number; the other arguments are those of gen()."""
    return gen(name, max_tokens, dtype=int, **wishes)


def gen_string(name: str | None = None, max_tokens: int | None = None, **wishes: Any) -> Expr:
    """A text in double quotes; the other arguments are those of gen()."""
    return gen(name, max_tokens, dtype=str, **wishes)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod | None = None,
) -> Expr:
    """The likeliest of the choices, by default by mean log-probability per token. Raises ValueError."""
    if isinstance(choices, str) or not choices:
        raise ValueError(f"select needs a list of at least one choice, not {choices!r}")
    options = [str(choice) for choice in choices]
    if not all(options):
        raise ValueError("an empty choice cannot be selected: it has no tokens to score")
    if not isinstance(temperature, numbers.Real) or temperature > 1e-5:
        raise ValueError("select takes the likeliest choice, so its temperature must be 0")
    return Select(name, options, choices_method or token_length_normalized)


def _typed(
    dtype: type | str, regex: str | None, json_schema: Any, ebnf: str | None, stops: tuple[str, ...] | None
) -> tuple[str, tuple[str, ...] | None]:
    if regex is not None or json_schema is not None or ebnf is not None:
        raise ValueError("dtype, regex, json_schema and ebnf exclude each other")
    if dtype not in _DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; there are int, float, bool and str")
    pattern, more = _DTYPES[dtype]
    return pattern, (*(stops or ()), *more) or None


def _refuse_values(sampling: Sampling) -> None:
    """A wish is sent as it is, so it cannot mention what is not generated yet. Arguments of a trace may stand in it."""
    for field in fields(sampling):
        for value in expressions_in(getattr(sampling, field.name)):
            if not isinstance(value, Known):
                raise ValueError(f"{field.name} mentions {value!r}, which has no value yet; use s[{value.name!r}]")


def _turn(role: str, expression: Any) -> Expr:
    if expression is None:
        return RoleBegin(role)
    return ExprSequence([RoleBegin(role, is_spoken(expression)), expression, RoleEnd(role)])


def system(expression: Any = None) -> Expr:
    """A system message, as the model's own chat template writes it."""
    return _turn("system", expression)


def user(expression: Any = None) -> Expr:
    return _turn("user", expression)


def assistant(expression: Any = None) -> Expr:
    return _turn("assistant", expression)


def system_begin() -> Expr:
    return RoleBegin("system")


def system_end() -> Expr:
    return RoleEnd("system")


def user_begin() -> Expr:
    return RoleBegin("user")


def user_end() -> Expr:
    return RoleEnd("user")


def assistant_begin() -> Expr:
    return RoleBegin("assistant")


def assistant_end() -> Expr:
    return RoleEnd("assistant")


def separate_reasoning(expression: Any, model_type: str | None = None) -> Expr:
    """Generations inside keep their answers; the thoughts before them become `<name>_reasoning_content`.

    `model_type` names how the model marks its thoughts. Raises ValueError for a type nobody told about.
    """
    kind = model_type or "deepseek-r1"
    reasoning.tags_of(kind)
    return Reasoning(expression, kind)
