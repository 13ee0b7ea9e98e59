"""Reasoning before a constraint, over real sockets: free until the end mark, then what the tools' grammar allows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from radixfleet.models import resolve
from services.tokenizer.output import Output
from services.tokenizer.tools import definitions, enforcement, formats
from services.tokenizer.tools.reader import Reading
from shared.messages.stream import FinishReason
from tests.local_fleet import tokens
from tests.protocol.house import House
from tests.scheduler.guided_kit import text_of

pytestmark = pytest.mark.timeout(120)
PARAMETERS = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
TOOL = {"type": "function", "function": {"name": "count", "parameters": PARAMETERS}}
BOX = definitions.read([TOOL], "required", False)


async def test_a_call_follows_the_thoughts(house: House) -> None:
    """One answer thinks until only the call still fits its budget, another one until its end mark comes by itself."""
    await house.scheduler(model_path=str(resolve(None)), heartbeat_timeout=60.0)
    await house.worker()
    detokenizer, frontend = await house.detokenizer(), await house.frontend()
    constraint = enforcement.constrain(None, BOX, formats.HERMES)
    frontend.submit("long", tokens(20, 3), 80, constraint=constraint, thinking_end_id=17)
    await detokenizer.until(lambda: detokenizer.finished("long"), 60)
    long = answer(detokenizer.streams["long"])
    thoughts = long[: long.index(17)]
    assert len(thoughts) > 8
    assert call_in(long[len(thoughts) + 1 :])["n"] <= 99

    end_id = thoughts[5]
    assert thoughts.index(end_id) == 5
    frontend.submit("short", tokens(20, 3), 80, constraint=constraint, thinking_end_id=end_id)
    await detokenizer.until(lambda: detokenizer.finished("short"), 60)
    short = answer(detokenizer.streams["short"])
    assert short[:6] == thoughts[:6]
    assert call_in(short[6:])["n"] <= 99


def answer(stream: Any) -> list[int]:
    assert stream.finish.reason is FinishReason.STOP
    return list(stream.tokens)


def call_in(ids: list[int]) -> dict[str, int]:
    """The arguments of the only call, and nothing beside it."""
    parsed, _ = Reading(format=formats.HERMES, box=BOX).whole(spoken(text_of(ids)))
    assert parsed.text == ""
    [call] = parsed.calls
    arguments: dict[str, int] = json.loads(call.arguments)
    return arguments


def spoken(text: str) -> Output:
    output = Output()
    output.text = text
    return output
