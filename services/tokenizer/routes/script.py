"""POST /script and /unpin; leaves the steps of a script to the scripts package."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.tokenizer import body, validation
from services.tokenizer.context import Context
from services.tokenizer.errors import ApiError
from services.tokenizer.metrics import RequestTimer
from services.tokenizer.openapi import takes
from services.tokenizer.schema import REFUSED_GENERATE
from services.tokenizer.scripts import pins
from services.tokenizer.scripts.body import ScriptBody, UnpinBody
from services.tokenizer.scripts.chain import Chain
from services.tokenizer.scripts.reply import ScriptReply

REFUSED = {**REFUSED_GENERATE, "session_params": "a script goes on by itself"}


def router(context: Context) -> APIRouter:
    routes = APIRouter(tags=["native"])

    @routes.post("/script", openapi_extra=takes(ScriptBody))
    async def script(request: Request) -> Response:
        """Run a chain of generations, constants and selects as one request."""
        if not context.config.script:
            raise ApiError(404, "Scripts are switched off on this server (--no-script).", code="script_disabled")
        wishes, unknown = await body.read(request, context, ScriptBody, REFUSED)
        context.check_model(wishes.model)
        timer = RequestTimer(context.measurements, 1, streaming=bool(wishes.stream))
        chain = Chain(context, wishes, timer)
        headers = context.ignored([*unknown, *chain.unknown])
        return ScriptReply(chain, wishes, timer, context.config.keep_alive_interval, headers)

    @routes.post("/unpin", openapi_extra=takes(UnpinBody))
    async def unpin(request: Request) -> Response:
        """End a pin that /generate made; an unknown name is no error."""
        wishes, unknown = await body.read(request, context, UnpinBody, {})
        await context.frontend.operate("unpin", pins.full_name(validation.bounded_key("pin", wishes.pin)))
        return Response(status_code=200, headers=context.ignored(unknown))

    return routes
