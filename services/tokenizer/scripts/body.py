"""The bodies of /script and /unpin, and the prompt parts they share with /generate. Leaves running to chain."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from services.tokenizer import validation
from services.tokenizer.errors import invalid

MAX_STEPS = 256
MAX_WORK = 64  # generations and selects of one script
Method = Literal["token_length_normalized", "greedy_token_selection"]


class PromptPart(msgspec.Struct, kw_only=True):
    """A piece of a prompt: `text`, or token `ids` as they stand. `literal`: control tokens in it are only letters."""

    text: str | None = None
    ids: list[int] | None = None
    literal: bool | None = None


class GenStep(msgspec.Struct, kw_only=True):
    """One generation; the fields are those of /generate."""

    name: str | None = None
    sampling_params: dict[str, Any] | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None


class SelectStep(msgspec.Struct, kw_only=True):
    """The likeliest of some texts. `literal`: control tokens in them are only letters."""

    choices: list[str]
    name: str | None = None
    method: Method | None = None
    literal: bool | None = None


class ScriptStep(msgspec.Struct, kw_only=True):
    """Exactly one of `text`, `again`, `gen` and `select`.

    `again` is the number of an earlier generation or select (from 0), whose text is repeated here as text.
    """

    text: str | None = None
    again: int | None = None
    gen: GenStep | None = None
    select: SelectStep | None = None
    literal: bool | None = None

    @property
    def work(self) -> GenStep | SelectStep | None:
        """What the model has to do, if anything."""
        return self.gen or self.select


class ScriptBody(msgspec.Struct, kw_only=True):
    """POST /script. `templated`: a chat template opened the prompt and wrote its own first token.

    A stream brings an event for each finished part, and with `deltas` (on by default) events for new text, too.
    """

    prompt_parts: list[PromptPart]
    steps: list[ScriptStep]
    templated: bool | None = None
    rid: str | None = None
    stream: bool | None = None
    deltas: bool | None = None
    return_prompt_token_ids: bool | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    model: str | None = None


class UnpinBody(msgspec.Struct, kw_only=True):
    """POST /unpin. The name of a pin that /generate made."""

    pin: str


def check_parts(parts: list[PromptPart], vocab_size: int, limit: int) -> None:
    """Raises ApiError where a part is none, or holds what the model does not have."""
    for index, part in enumerate(parts):
        name = f"prompt_parts[{index}]"
        if (part.text is None) == (part.ids is None):
            raise invalid(f"{name} needs either text or ids.", name, "invalid_value")
        if part.ids is not None:
            validation.token_ids(f"{name}.ids", part.ids, vocab_size, most=limit)


def check_steps(steps: list[ScriptStep], most_choices: int) -> None:
    """Raises ApiError where the steps make no script."""
    validation.in_range("steps", len(steps), 1, MAX_STEPS)
    work = 0
    for index, step in enumerate(steps):
        name = f"steps[{index}]"
        given = [step.text is not None, step.again is not None, step.gen is not None, step.select is not None]
        if sum(given) != 1:
            raise invalid(f"{name} needs exactly one of text, again, gen and select.", name, "invalid_value")
        if step.again is not None and not work:
            raise invalid(f"{name}.again has no generation or select before it.", f"{name}.again", "out_of_range")
        if step.again is not None:
            validation.in_range(f"{name}.again", step.again, 0, work - 1)
        if step.select is not None:
            _check_choices(f"{name}.select.choices", step.select.choices, most_choices)
        work += step.work is not None
    if not work:
        raise invalid("A script without a generation or a select has nothing to do.", "steps", "invalid_value")
    validation.in_range("generations and selects in steps", work, 1, MAX_WORK)


def _check_choices(name: str, choices: list[str], most: int) -> None:
    validation.in_range(name, len(choices), 1, most)
    if not all(choices):
        raise invalid(f"{name} must not hold an empty string.", name, "invalid_value")
    if len(set(choices)) != len(choices):
        raise invalid(f"{name} holds the same text twice.", name, "invalid_value")
