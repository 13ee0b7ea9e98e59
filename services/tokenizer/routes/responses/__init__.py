"""/v1/responses: make, read, delete and cancel responses. Leaves items to translate, words to render.responses."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from services.tokenizer import body, calls, sse
from services.tokenizer.context import Context
from services.tokenizer.errors import ApiError, invalid
from services.tokenizer.metrics import RequestTimer
from services.tokenizer.openapi import takes
from services.tokenizer.render.response_items import as_message
from services.tokenizer.render.responses import ResponsesAnswerer
from services.tokenizer.routes.conversation import Conversations, Prepared, renamed
from services.tokenizer.routes.responses import listing, translate
from services.tokenizer.routes.responses.fields import REFUSED_RESPONSES, ResponsesBody

_PATH = "/v1/responses/{response_id}"


class Stored(msgspec.Struct):
    """One entry of the store: the response as it was answered, its input, and the conversation that it ends."""

    response: msgspec.Raw
    input: str | list[dict[str, Any]]
    messages: list[dict[str, Any]]


def router(context: Context) -> APIRouter:
    routes = APIRouter(tags=["openai"])
    desk = _Desk(context)

    @routes.post("/v1/responses", openapi_extra=takes(ResponsesBody))
    async def create_response(request: Request) -> Response:
        """Answer an input, or the next turn of a stored conversation."""
        wishes, unknown = await body.read(request, context, ResponsesBody, REFUSED_RESPONSES)
        try:
            return await desk.create(wishes, unknown)
        except ApiError as error:
            raise renamed(error, translate.PLACES) from None

    @routes.get(_PATH)
    async def get_response(request: Request, response_id: str) -> Response:
        """A stored response."""
        listing.refuse_replay(request.query_params)
        return _json(bytes((await desk.stored(response_id)).response))

    @routes.get(_PATH + "/input_items")
    async def get_input_items(request: Request, response_id: str) -> Response:
        """The input that a stored response answers, the last item first; query: `limit`, `order`, `after`."""
        given = (await desk.stored(response_id)).input
        return _json(sse.json_bytes(listing.page(given, response_id, request.query_params)))

    @routes.delete(_PATH)
    async def delete_response(response_id: str) -> Response:
        """Forget a stored response; those that continue it stay."""
        if not await context.responses.delete(response_id, calls.current().tenant):
            raise _missing(response_id)
        return _json(sse.json_bytes({"id": response_id, "object": "response", "deleted": True}))

    @routes.post(_PATH + "/cancel")
    async def cancel_response(response_id: str) -> Response:
        """End a response that is being made; one that is complete stays as it is."""
        return _json(await desk.cancel(response_id))

    return routes


class _Desk:
    """What the routes share."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._conversations = Conversations(context)
        self._live: WeakValueDictionary[tuple[str, str], ResponsesAnswerer] = WeakValueDictionary()

    async def create(self, wishes: ResponsesBody, unknown: list[str]) -> Response:
        context, owner = self._context, calls.current().tenant
        context.check_model(wishes.model)
        timer = RequestTimer(context.measurements, 1, streaming=bool(wishes.stream))
        conversation = await self._conversation(wishes, owner)
        chat = translate.chat_body(wishes, conversation)
        prepared = await self._conversations.prepare(chat, "resp_")
        head = _head(wishes, prepared, wishes.model or context.model.served_name)
        logprobs = bool(chat.logprobs)
        answerer = ResponsesAnswerer(
            head, prepared.counts, prepared.reading, context.vocabulary, with_logprobs=logprobs
        )
        self._live[owner, prepared.response_id] = answerer

        async def keep() -> None:
            if wishes.store is not False and answerer.is_final:
                messages = [*conversation, as_message(answerer.items)]
                response = msgspec.Raw(sse.json_bytes(answerer.response()))
                entry = msgspec.json.encode(Stored(response, wishes.input, messages))
                await context.responses.put(prepared.response_id, owner, entry)

        headers = context.ignored(unknown)
        exchange = context.exchange(prepared.group, answerer, timer, streaming=bool(wishes.stream), headers=headers)
        return exchange.adapt(
            explain=lambda error: renamed(prepared.explain(error), translate.PLACES), fail=answerer.fail, settle=keep
        )

    async def stored(self, response_id: str) -> Stored:
        """Raises ApiError where the caller has no such response."""
        found = await self._context.responses.get(response_id, calls.current().tenant)
        if found is None:
            raise _missing(response_id)
        return msgspec.json.decode(found, type=Stored)

    async def cancel(self, response_id: str) -> bytes:
        answerer = self._live.get((calls.current().tenant, response_id))
        if answerer is None:
            self._context.frontend.abort(response_id)  # another HTTP process may be making it; here it is not known
        if answerer is None or answerer.is_final:
            return bytes((await self.stored(response_id)).response)
        self._context.frontend.abort(response_id)
        return sse.json_bytes({**answerer.response(), "status": "cancelled"})

    async def _conversation(self, wishes: ResponsesBody, owner: str) -> list[dict[str, Any]]:
        """Stored turns and the new input."""
        new = translate.messages(wishes.input)
        if not wishes.previous_response_id:
            return new
        found = await self._context.responses.get(wishes.previous_response_id, owner)
        if found is None:
            text = f"There is no response {wishes.previous_response_id[:128]!r} to continue."
            raise invalid(text, "previous_response_id", "previous_response_not_found")
        return [*msgspec.json.decode(found, type=Stored).messages, *new]


def _head(wishes: ResponsesBody, prepared: Prepared, model: str) -> dict[str, Any]:
    """The fields of the response that only repeat the request, with its defaults filled in."""
    sampling = prepared.group.streams[0].request.sampling
    return {
        "id": prepared.response_id,
        "object": "response",
        "background": False,
        "instructions": wishes.instructions,
        "max_output_tokens": wishes.max_output_tokens,
        "max_tool_calls": wishes.max_tool_calls,
        "metadata": wishes.metadata or {},
        "model": model,
        "parallel_tool_calls": wishes.parallel_tool_calls is not False,
        "previous_response_id": wishes.previous_response_id,
        "prompt_cache_key": wishes.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None, **(wishes.reasoning or {})},
        "safety_identifier": wishes.safety_identifier,
        "service_tier": "default",
        "store": wishes.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, "verbosity": "medium", **(wishes.text or {})},
        "tool_choice": wishes.tool_choice or "auto",
        "tools": wishes.tools or [],
        "top_logprobs": wishes.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": wishes.user,
    }


def _missing(response_id: str) -> ApiError:
    return ApiError(404, f"There is no response {response_id[:128]!r}.", param="response_id")


def _json(data: bytes) -> Response:
    return Response(data, media_type="application/json")
