"""Bodies of /v1/responses and /v1/messages become chats or errors that name a field, whatever they hold."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer import messages as chat_messages
from services.tokenizer.errors import ApiError
from services.tokenizer.routes.messages import translate as from_messages
from services.tokenizer.routes.messages.fields import MessagesBody
from services.tokenizer.routes.responses import translate as from_responses
from services.tokenizer.routes.responses.fields import ResponsesBody
from services.tokenizer.tools import definitions, enforcement, formats

KEYS = [
    *("type", "role", "content", "text", "name", "arguments", "call_id", "output", "input", "id", "tool_use_id"),
    *("thinking", "summary", "format", "schema", "function", "parameters", "input_schema", "strict", "effort"),
    *("properties", "required", "enum", "anyOf", "items", "pattern", "mode", "tools"),
]
WORDS = [
    *(
        "user",
        "assistant",
        "system",
        "message",
        "function_call",
        "function_call_output",
        "reasoning",
        "text",
        "function",
    ),
    *("input_text", "output_text", "tool_use", "tool_result", "thinking", "object", "string", "json_schema", "custom"),
    *("auto", "any", "tool", "required", "allowed_tools", "f", "{}", ""),
]
LEAVES = st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(WORDS)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=5),
    max_leaves=20,
)
OBJECT = st.dictionaries(st.sampled_from(KEYS), JSON, max_size=6)
FIELDS: dict[str, Any] = {"tools": st.lists(OBJECT, max_size=2), "tool_choice": OBJECT}


def settle(body: Any, translate: Any) -> None:
    """As the routes do it, up to the prompt."""
    failure = None
    try:
        chat = translate(body)
        chat_messages.normalize(chat.messages)
        box = definitions.read(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
        for form in (formats.HERMES, formats.PYTHONIC):
            constraint = enforcement.constrain(None, box, form)
            assert (constraint is None) == (box is None)
    except ApiError as error:
        failure = error
    assert failure is None or (failure.status == 400 and failure.message)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(OBJECT, max_size=4), st.fixed_dictionaries({}, optional={**FIELDS, "text": OBJECT, "reasoning": OBJECT})
)
def test_responses(items: list[dict[str, Any]], fields: dict[str, Any]) -> None:
    body = msgspec.convert({"input": items, **fields}, ResponsesBody)
    settle(body, lambda wishes: from_responses.chat_body(wishes, from_responses.messages(wishes.input)))


@settings(max_examples=80, deadline=None)
@given(
    st.lists(OBJECT, max_size=4),
    st.fixed_dictionaries(
        {}, optional={**FIELDS, "output_config": OBJECT, "thinking": OBJECT, "system": st.lists(OBJECT)}
    ),
)
def test_messages(messages: list[dict[str, Any]], fields: dict[str, Any]) -> None:
    body = msgspec.convert({"messages": messages, **fields}, MessagesBody)
    settle(body, from_messages.chat_body)


@settings(max_examples=80, deadline=None)
@given(OBJECT, st.booleans())
def test_schemas_of_tools(schema: dict[str, Any], strict: bool) -> None:
    function = {"name": "f", "parameters": {"type": "object", **schema}, "strict": strict}
    failure = None
    try:
        box = definitions.read([{"type": "function", "function": function}], "required", True)
        for form in formats.NAMED.values():
            assert enforcement.constrain(None, box, form) is not None
    except ApiError as error:
        failure = error
    assert failure is None or str(failure.param).startswith("tools[0].function")


def test_turns_of_the_assistant_are_one_message() -> None:
    items: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Look."}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
    ]
    user, assistant, *results = from_responses.messages(items)
    assert user == {"role": "user", "content": "ab"}
    assert (assistant["content"], assistant["reasoning_content"]) == ("Look.", "hm")
    assert [call["id"] for call in assistant["tool_calls"]] == ["c1", "c2"]
    assert [result["content"] for result in results] == ["1", "2"]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_instructions_and_a_system_message_are_one(role: str) -> None:
    body = ResponsesBody(input=[{"role": role, "content": "B"}, {"role": "user", "content": "c"}], instructions="A")
    chat = from_responses.chat_body(body, from_responses.messages(body.input))
    assert [message["content"] for message in chat.messages] == ["A\n\nB", "c"]
