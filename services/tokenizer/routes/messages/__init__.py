"""Anthropic's /v1/messages and its count of tokens. Leaves blocks to translate, words to render.messages."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.tokenizer import body, sse
from services.tokenizer.context import Context
from services.tokenizer.errors import ApiError, invalid
from services.tokenizer.metrics import RequestTimer
from services.tokenizer.openapi import takes
from services.tokenizer.render.messages import MessagesAnswerer
from services.tokenizer.routes.conversation import Conversations, renamed
from services.tokenizer.routes.messages import envelope, translate
from services.tokenizer.routes.messages.fields import REFUSED_MESSAGES, MessagesBody


def router(context: Context) -> APIRouter:
    routes = APIRouter(tags=["anthropic"])
    conversations = Conversations(context)

    @routes.post("/v1/messages", openapi_extra=takes(MessagesBody))
    async def create_message(request: Request) -> Response:
        """Answer a conversation."""
        wishes, unknown = await body.read(request, context, MessagesBody, REFUSED_MESSAGES)
        try:
            return await _answer(context, conversations, wishes, unknown)
        except ApiError as error:
            raise renamed(error, translate.PLACES) from None

    @routes.post("/v1/messages/count_tokens", openapi_extra=takes(MessagesBody))
    async def count_tokens(request: Request) -> Response:
        """How long the prompt of a conversation is."""
        wishes, unknown = await body.read(request, context, MessagesBody, REFUSED_MESSAGES)
        context.check_model(wishes.model)
        try:
            count = await conversations.count(translate.chat_body(wishes))
        except ApiError as error:
            raise renamed(error, translate.PLACES) from None
        headers = context.ignored(unknown)
        return Response(sse.json_bytes({"input_tokens": count}), headers=headers, media_type="application/json")

    return routes


async def _answer(context: Context, conversations: Conversations, wishes: MessagesBody, unknown: list[str]) -> Response:
    context.check_model(wishes.model)
    if wishes.max_tokens is None:
        raise invalid("max_tokens is required.", "max_tokens", "missing_required_parameter")
    timer = RequestTimer(context.measurements, 1, streaming=bool(wishes.stream))
    prepared = await conversations.prepare(translate.chat_body(wishes), "msg_")
    model = wishes.model or context.model.served_name
    answerer = MessagesAnswerer(prepared.response_id, model, prepared.counts, prepared.reading)
    headers = context.ignored(unknown)
    exchange = context.exchange(prepared.group, answerer, timer, streaming=bool(wishes.stream), headers=headers)
    return exchange.adapt(
        explain=lambda error: renamed(prepared.explain(error), translate.PLACES),
        fail=lambda error: sse.named("error", envelope.of(error)),
    )
