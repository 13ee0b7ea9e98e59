"""POST /v1/chat/completions; leaves templates to text and words to render.chat."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.tokenizer import body, messages, requests, sampling, sse, validation
from services.tokenizer.context import Context
from services.tokenizer.errors import invalid
from services.tokenizer.metrics import RequestTimer
from services.tokenizer.openapi import takes
from services.tokenizer.render.chat import ChatAnswerer
from services.tokenizer.render.usage import Counts
from services.tokenizer.requests import Prompt
from services.tokenizer.routes.openai_fields import (
    model_defaults,
    prompt_options,
    single,
    stream_options,
)
from services.tokenizer.sampling import Names, ScoreWishes
from services.tokenizer.schema import REFUSED_OPENAI, ChatBody, ChatTemplateBody
from shared.messages.request import SamplingParams

TEMPLATE_KWARGS_REFUSED = frozenset(
    ("messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize")
)


def router(context: Context) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", openapi_extra=takes(ChatBody), tags=["openai"])
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        wishes, unknown = await body.read(request, context, ChatBody, REFUSED_OPENAI)
        return await _answer(context, wishes, unknown)

    @routes.post("/apply_chat_template", openapi_extra=takes(ChatTemplateBody), tags=["native"])
    async def apply_chat_template(request: Request) -> Response:
        """The text that the model's chat template makes of a conversation."""
        wishes, unknown = await body.read(request, context, ChatTemplateBody, {})
        context.check_model(wishes.model)
        conversation, kwargs, options = _template_input(wishes)
        text = await context.text.render_chat(conversation, None, kwargs, context.limit, **options)
        return Response(sse.json_bytes({"text": text}), headers=context.ignored(unknown), media_type="application/json")

    return routes


async def _answer(context: Context, wishes: ChatBody, unknown: list[str]) -> Response:
    context.check_model(wishes.model)
    n = sampling.choices(wishes, Names(), 1, context.config.max_batch_size)
    timer = RequestTimer(context.measurements, n, streaming=bool(wishes.stream))
    options = stream_options(wishes)
    params = _params(context, wishes)
    [(rid, names)] = requests.item_rids(single(wishes.rid, "rid"), 1, False, "chatcmpl-")
    max_tokens = wishes.max_completion_tokens
    prompt = Prompt(
        ids=await _encode(context, wishes),
        params=params,
        wished=max_tokens if max_tokens is not None else wishes.max_tokens,
        default_max_tokens=None,
        rid=rid,
        names=names,
        n=n,
        **prompt_options(wishes),
    )
    max_param = "max_tokens" if max_tokens is None else "max_completion_tokens"
    requests.settle_length(prompt, context.limit, context.config.strict_length, "messages", max_param)
    answerer = ChatAnswerer(
        response_id=names[0],
        model=wishes.model or context.model.served_name,
        counts=Counts([len(prompt.ids)], n),
        vocabulary=context.vocabulary,
        with_logprobs=bool(wishes.logprobs),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
    )
    group = requests.make_group([prompt], context.seeds)
    headers = context.ignored(unknown)
    return context.exchange(group, answerer, timer, streaming=bool(wishes.stream), headers=headers)


def _params(context: Context, wishes: ChatBody) -> SamplingParams:
    most = context.config.max_logprobs
    validation.in_range("top_logprobs", wishes.top_logprobs, 0, most)
    validation.in_range("max_completion_tokens", wishes.max_completion_tokens, 0, float("inf"))
    if wishes.top_logprobs and not wishes.logprobs:
        raise invalid("top_logprobs needs logprobs = true.", "top_logprobs", "invalid_value")
    scores = ScoreWishes(top=(wishes.top_logprobs or 0) if wishes.logprobs else -1)
    return sampling.build(wishes, Names(), context.model, model_defaults(context), scores, most)


async def _encode(context: Context, wishes: ChatBody) -> Any:
    tools = _tools(wishes)
    conversation, kwargs, options = _template_input(wishes)
    return await context.text.encode_chat(conversation, tools, kwargs, context.limit, **options)


def _template_input(
    wishes: ChatBody | ChatTemplateBody,
) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, bool]]:
    """Messages, the template's own arguments, and how the prompt ends."""
    conversation = messages.normalize(wishes.messages)
    kwargs = wishes.chat_template_kwargs or {}
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


def _tools(wishes: ChatBody) -> list[dict[str, Any]] | None:
    """Tools change what the model may say, so they are refused until that can be held; "none" switches them off."""
    if not wishes.tools:
        if wishes.tool_choice not in (None, "none", "auto"):
            raise invalid("tool_choice needs tools.", "tool_choice", "invalid_value")
        return None
    if wishes.tool_choice == "none":
        return None
    raise invalid("tools are not supported by this server yet.", "tools", "unsupported_parameter")
