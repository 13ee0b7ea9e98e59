"""Reads a finished text as the server reads answers: its tool calls, or its reasoning. Nothing is generated."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from services.tokenizer import body, sse
from services.tokenizer.context import Context
from services.tokenizer.errors import invalid
from services.tokenizer.openapi import takes
from services.tokenizer.output import Output
from services.tokenizer.reasoning import styles
from services.tokenizer.tools import definitions, formats
from services.tokenizer.tools.pieces import Parsed
from services.tokenizer.tools.reader import Reading


class ParseCallsBody(msgspec.Struct, kw_only=True):
    """POST /parse_function_call."""

    text: str
    tools: list[dict[str, Any]]
    tool_call_parser: str | None = None


class SeparateReasoningBody(msgspec.Struct, kw_only=True):
    """POST /separate_reasoning."""

    text: str
    reasoning_parser: str | None = None


def router(context: Context) -> APIRouter:
    routes = APIRouter(tags=["native"])

    @routes.post("/parse_function_call", openapi_extra=takes(ParseCallsBody))
    async def parse_function_call(request: Request) -> Response:
        """The tool calls in a text."""
        wishes, unknown = await body.read(request, context, ParseCallsBody, {})
        found = await context.text.run(_calls, context, wishes)
        return Response(sse.json_bytes(found), headers=context.ignored(unknown), media_type="application/json")

    @routes.post("/separate_reasoning", openapi_extra=takes(SeparateReasoningBody))
    async def separate_reasoning(request: Request) -> Response:
        """The reasoning in a text, and what follows it."""
        wishes, unknown = await body.read(request, context, SeparateReasoningBody, {})
        style = styles.choose(wishes.reasoning_parser or context.config.reasoning_parser)
        if style is None:
            text = f"reasoning_parser must be one of {', '.join(styles.STYLES)}."
            raise invalid(text, "reasoning_parser", "invalid_value")
        parsed = await context.text.run(_read, Reading(style=style, opened=style.opens), wishes.text)
        found = {"reasoning_text": parsed.thought, "text": parsed.text}
        return Response(sse.json_bytes(found), headers=context.ignored(unknown), media_type="application/json")

    return routes


def _calls(context: Context, wishes: ParseCallsBody) -> dict[str, Any]:
    name = wishes.tool_call_parser or context.config.tool_call_parser
    if name != "auto" and name not in formats.NAMED:
        text = f"tool_call_parser must be one of auto, {', '.join(formats.NAMED)}."
        raise invalid(text, "tool_call_parser", "invalid_value")
    box = definitions.read(wishes.tools, "auto", True)
    if box is None:
        raise invalid("tools is empty.", "tools", "invalid_value")
    form = formats.choose(name, context.model.chat_template)
    parsed = _read(Reading(format=form, box=box), wishes.text)
    places = {tool.name: index for index, tool in enumerate(box.defined)}
    calls = [
        {"tool_index": places[call.name], "name": call.name, "parameters": call.arguments} for call in parsed.calls
    ]
    return {"normal_text": parsed.text, "calls": calls}


def _read(reading: Reading, text: str) -> Parsed:
    output = Output()
    output.text = text
    parsed, _ = reading.whole(output)
    return parsed
