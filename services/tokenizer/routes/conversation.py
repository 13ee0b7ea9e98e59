"""From a conversation to requests, for every route that takes one: tools, reasoning, constraint, prompt.

Leaves wishes to schema, tool formats to tools and the answer's words to render/.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from services.tokenizer import messages, requests, sampling, validation
from services.tokenizer.context import Context
from services.tokenizer.errors import ApiError, invalid
from services.tokenizer.reasoning import styles
from services.tokenizer.render.usage import Counts
from services.tokenizer.requests import Prompt
from services.tokenizer.routes.openai_fields import model_defaults, prompt_options, single
from services.tokenizer.sampling import Names, ScoreWishes
from services.tokenizer.schema import ChatBody, ChatTemplateBody
from services.tokenizer.streams import Group
from services.tokenizer.tools import definitions, enforcement, formats, prompting
from services.tokenizer.tools.definitions import Toolbox
from services.tokenizer.tools.reader import Reading
from shared.messages.request import SamplingParams

TEMPLATE_KWARGS_REFUSED = frozenset(
    ("messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize")
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_TAIL = 16  # tokens at the prompt's end that show whether the template has opened or closed the reasoning


class Prepared(msgspec.Struct, frozen=True):
    """What a route needs to answer."""

    group: Group
    counts: Counts
    reading: Reading
    response_id: str

    def explain(self, error: ApiError) -> ApiError:
        """A refusal in the request's own terms."""
        return enforcement.explain(error, self.reading.box)


class Conversations:
    """The chat side of one model."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._format = formats.choose(context.config.tool_call_parser, context.model.chat_template)
        self._style = styles.choose(context.config.reasoning_parser)

    async def prepare(self, wishes: ChatBody, prefix: str) -> Prepared:
        """Everything up to the requests; raises ApiError. `prefix` begins the answer's id."""
        context = self._context
        n = sampling.choices(wishes, Names(), 1, context.config.max_batch_size)
        params = _params(context, wishes)
        [(rid, names)] = requests.item_rids(single(wishes.rid, "rid"), 1, False, prefix)
        box = definitions.read(wishes.tools, wishes.tool_choice, wishes.parallel_tool_calls)
        options = prompt_options(wishes)
        options["constraint"] = enforcement.constrain(options["constraint"], box, self._format)
        ids = await self._encode(wishes, box)
        reading = await self._reading(wishes, box, ids, constrained=options["constraint"] is not None)
        options["skip_special_tokens"] &= not self._has_special_marks(reading)
        max_tokens = wishes.max_completion_tokens
        prompt = Prompt(
            ids=ids,
            params=params,
            wished=max_tokens if max_tokens is not None else wishes.max_tokens,
            default_max_tokens=None,
            rid=rid,
            names=names,
            n=n,
            thinking_end_id=reading.end_id if reading.opened and options["constraint"] is not None else -1,
            **options,
        )
        max_param = "max_tokens" if max_tokens is None else "max_completion_tokens"
        requests.settle_length(prompt, context.limit, context.config.strict_length, "messages", max_param)
        group = requests.make_group([prompt], context.seeds)
        return Prepared(group, Counts([len(prompt.ids)], n), reading, names[0])

    async def count(self, wishes: ChatBody) -> int:
        """Tokens of the prompt."""
        box = definitions.read(wishes.tools, wishes.tool_choice, wishes.parallel_tool_calls)
        return len(await self._encode(wishes, box))

    async def _encode(self, wishes: ChatBody, box: Toolbox | None) -> array[int]:
        conversation, kwargs, options = template_input(wishes)
        text, tools = self._context.text, None
        if not text.template_knows_developer:
            conversation = prompting.without_developer(conversation)
        if text.template_knows_tools:
            tools = box.definitions() if box is not None else None
        else:
            conversation = prompting.plain_history(conversation, self._format)
            if box is not None:
                conversation = prompting.with_system(conversation, prompting.system_text(box, self._format))
        try:
            return await text.encode_chat(conversation, tools, kwargs, self._context.limit, **options)
        except ApiError as error:
            if error.status != 400 or not any(map(prompting.has_calls, conversation)):
                raise
        conversation = [prompting.with_text_arguments(message) for message in conversation]
        return await text.encode_chat(conversation, tools, kwargs, self._context.limit, **options)

    async def _reading(self, wishes: ChatBody, box: Toolbox | None, ids: array[int], *, constrained: bool) -> Reading:
        """How to read the answer. Where a grammar has to wait for the end of the reasoning, that is opened here."""
        text, style = self._context.text, self._style
        reading = Reading(format=self._format, box=box)
        if style is None:
            return reading
        tail = (await text.decode(ids[-_TAIL:], skip_special_tokens=False)).rstrip()
        begin_id, end_id = text.token_id(style.begin), text.token_id(style.end)
        opened = tail.endswith(style.begin)
        if not opened and not tail.endswith(style.end) and not wishes.continue_final_message:
            opened = style.opens
            if constrained and not opened and begin_id >= 0 and end_id >= 0 and _may_think(wishes, style.switches):
                ids.append(begin_id)
                opened = True
        return Reading(
            format=self._format,
            box=box,
            style=style,
            opened=opened and not (constrained and end_id < 0),
            end_id=end_id,
            separate=wishes.separate_reasoning is not False,
            stream_thoughts=wishes.stream_reasoning is not False,
        )

    def _has_special_marks(self, reading: Reading) -> bool:
        """Whether the text would lose marks if special tokens were left out."""
        marks: tuple[str, ...] = self._format.marks if reading.box is not None else ()
        if reading.style is not None:
            marks = (*marks, reading.style.begin, reading.style.end)
        return any(map(self._context.text.is_special, marks))


def renamed(error: ApiError, places: Iterable[tuple[re.Pattern[str], str]]) -> ApiError:
    """An error with another API's names of fields."""
    message, param = error.message, error.param or ""
    for pattern, name in places:
        message, param = pattern.sub(name, message), pattern.sub(name, param)
    return ApiError(
        error.status,
        message,
        param=param or None,
        code=error.code,
        retry_after=error.retry_after,
        headers=error.headers,
    )


def effort_kwargs(wishes: ChatBody | ChatTemplateBody) -> dict[str, Any]:
    """The reasoning effort in the words of chat templates. Raises ApiError."""
    effort = wishes.reasoning_effort if isinstance(wishes, ChatBody) else None
    if effort is None:
        return {}
    if effort not in EFFORTS:
        text = f"reasoning_effort must be one of {', '.join(EFFORTS)}."
        raise invalid(text, "reasoning_effort", "invalid_value")
    return {"enable_thinking": False, "thinking": False} if effort == "none" else {"reasoning_effort": effort}


def template_input(
    wishes: ChatBody | ChatTemplateBody,
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, bool]]:
    """Messages, the template's own arguments, and how the prompt ends."""
    conversation = messages.normalize(wishes.messages)
    kwargs = {**effort_kwargs(wishes), **(wishes.chat_template_kwargs or {})}
    for name in kwargs:
        if name in TEMPLATE_KWARGS_REFUSED:
            raise invalid(f"chat_template_kwargs.{name} is not allowed.", "chat_template_kwargs", "invalid_value")
    continued = bool(wishes.continue_final_message)
    if continued and conversation[-1]["role"] != "assistant":
        raise invalid("continue_final_message needs a last message of the assistant.", "continue_final_message")
    if continued and wishes.add_generation_prompt:
        raise invalid("continue_final_message and add_generation_prompt exclude each other.", "continue_final_message")
    generation_prompt = not continued and wishes.add_generation_prompt is not False
    return conversation, kwargs, {"add_generation_prompt": generation_prompt, "continue_final_message": continued}


def _params(context: Context, wishes: ChatBody) -> SamplingParams:
    most = context.config.max_logprobs
    validation.in_range("top_logprobs", wishes.top_logprobs, 0, most)
    validation.in_range("max_completion_tokens", wishes.max_completion_tokens, 0, float("inf"))
    if len({wishes.max_completion_tokens, wishes.max_tokens} - {None}) > 1:
        text = "max_tokens and max_completion_tokens differ; send one."
        raise invalid(text, "max_completion_tokens", "invalid_value")
    if wishes.top_logprobs and not wishes.logprobs:
        raise invalid("top_logprobs needs logprobs = true.", "top_logprobs", "invalid_value")
    scores = ScoreWishes(top=(wishes.top_logprobs or 0) if wishes.logprobs else -1)
    return sampling.build(wishes, Names(), context.model, model_defaults(context), scores, most)


def _may_think(wishes: ChatBody, switches: tuple[str, ...]) -> bool:
    kwargs: Mapping[str, Any] = {**effort_kwargs(wishes), **(wishes.chat_template_kwargs or {})}
    return all(kwargs.get(name) is not False for name in switches)
