"""POST /v1/chat/completions; leaves requests to conversation and words to render.chat."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.tokenizer import body, sampling, sse
from services.tokenizer.context import Context
from services.tokenizer.metrics import RequestTimer
from services.tokenizer.openapi import takes
from services.tokenizer.render.chat import ChatAnswerer
from services.tokenizer.routes.conversation import Conversations, template_input
from services.tokenizer.routes.openai_fields import stream_options
from services.tokenizer.sampling import Names
from services.tokenizer.schema import REFUSED_CHAT, ChatBody, ChatTemplateBody


def router(context: Context) -> APIRouter:
    routes = APIRouter()
    conversations = Conversations(context)

    @routes.post("/v1/chat/completions", openapi_extra=takes(ChatBody), tags=["openai"])
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        wishes, unknown = await body.read(request, context, ChatBody, REFUSED_CHAT)
        return await _answer(context, conversations, wishes, unknown)

    @routes.post("/apply_chat_template", openapi_extra=takes(ChatTemplateBody), tags=["native"])
    async def apply_chat_template(request: Request) -> Response:
        """The text that the model's chat template makes of a conversation."""
        wishes, unknown = await body.read(request, context, ChatTemplateBody, {})
        context.check_model(wishes.model)
        conversation, kwargs, options = template_input(wishes)
        text = await context.text.render_chat(conversation, None, kwargs, context.limit, **options)
        return Response(sse.json_bytes({"text": text}), headers=context.ignored(unknown), media_type="application/json")

    return routes


async def _answer(context: Context, conversations: Conversations, wishes: ChatBody, unknown: list[str]) -> Response:
    context.check_model(wishes.model)
    n = sampling.choices(wishes, Names(), 1, context.config.max_batch_size)
    timer = RequestTimer(context.measurements, n, streaming=bool(wishes.stream))
    options = stream_options(wishes)
    prepared = await conversations.prepare(wishes, "chatcmpl-")
    answerer = ChatAnswerer(
        response_id=prepared.response_id,
        model=wishes.model or context.model.served_name,
        counts=prepared.counts,
        vocabulary=context.vocabulary,
        reading=prepared.reading,
        with_logprobs=bool(wishes.logprobs),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
    )
    headers = context.ignored(unknown)
    exchange = context.exchange(prepared.group, answerer, timer, streaming=bool(wishes.stream), headers=headers)
    return exchange.adapt(explain=prepared.explain)
