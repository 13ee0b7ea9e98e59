"""What chat and completions read from a request alike; leaves the rest to those routes."""

from __future__ import annotations

from typing import Any

from services.tokenizer import constraints, requests, sampling, validation
from services.tokenizer.context import Context
from services.tokenizer.errors import invalid
from services.tokenizer.sampling import Names
from services.tokenizer.schema import OpenAIFields, StreamOptions


def stream_options(wishes: OpenAIFields) -> StreamOptions:
    if wishes.stream_options is not None and not wishes.stream:
        raise invalid("stream_options needs stream = true.", "stream_options", "invalid_value")
    return wishes.stream_options or StreamOptions()


def single(value: str | list[str] | None, name: str) -> str | None:
    """The value of a field that may be a list only where there are several prompts."""
    if isinstance(value, list):
        if len(value) != 1:
            raise invalid(f"{name} has {len(value)} entries for one prompt.", name, "invalid_value")
        return value[0]
    return value


def model_defaults(context: Context) -> dict[str, float]:
    """What the model's authors recommend, unless the operator wants the API's own defaults."""
    return context.model.sampling_defaults if context.config.sampling_defaults == "model" else {}


def prompt_options(wishes: OpenAIFields) -> dict[str, Any]:
    """The fields of Prompt that chat and completions fill alike."""
    validation.in_range("priority", wishes.priority, -(1 << 31), (1 << 31) - 1)
    return {
        "seeded": wishes.seed is not None,
        "stop_strings": sampling.stop_strings(wishes, Names()),
        "stop_regex": sampling.stop_patterns(wishes, Names()),
        "namespace": requests.namespace(single(wishes.extra_key, "extra_key"), wishes.cache_salt),
        "no_stop_trim": bool(wishes.no_stop_trim),
        "skip_special_tokens": wishes.skip_special_tokens is not False,
        "spaces_between_special_tokens": wishes.spaces_between_special_tokens is not False,
        "stream": bool(wishes.stream),
        "constraint": constraints.read(wishes, Names()),
        "priority": wishes.priority or 0,
    }
