"""Requests of /v1/responses as conversations: items become messages, fields get their names on chat.

Leaves everything behind the messages to conversation. Items of one turn of the assistant make one message:

    reasoning, message, function_call, function_call    ->  assistant: reasoning_content, content, tool_calls
    function_call_output                                ->  tool
"""

from __future__ import annotations

import re
from typing import Any

from services.tokenizer.errors import invalid
from services.tokenizer.messages import TEXT_PARTS
from services.tokenizer.routes.responses.fields import ResponsesBody
from services.tokenizer.schema import ChatBody, SamplingFields

Message = dict[str, Any]
ROLES = ("user", "assistant", "system", "developer")
INCLUDES = ("reasoning.encrypted_content", "message.output_text.logprobs")
_MOST_METADATA = 16
PLACES = (
    (re.compile(r"tools\[(\d+)\]\.function"), r"tools[\1]"),
    (re.compile(r"tool_choice\.function"), "tool_choice"),
    (re.compile(r"max_completion_tokens|\bmax_tokens\b"), "max_output_tokens"),
    (re.compile(r"response_format\.json_schema|response_format"), "text.format"),
    (re.compile(r"\bmessages\b"), "input"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
)


def chat_body(wishes: ResponsesBody, conversation: list[Message]) -> ChatBody:
    """The same wishes as a chat. Raises ApiError."""
    _check(wishes)
    sampling = {name: getattr(wishes, name) for name in SamplingFields.__struct_fields__}
    logprobs = bool(wishes.top_logprobs) or INCLUDES[1] in (wishes.include or ())
    return ChatBody(
        **sampling,
        messages=_with_instructions(wishes.instructions, conversation),
        model=wishes.model,
        stream=wishes.stream,
        max_completion_tokens=wishes.max_output_tokens,
        logprobs=logprobs,
        top_logprobs=wishes.top_logprobs,
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(wishes.tools or ())],
        tool_choice=wishes.tool_choice,
        parallel_tool_calls=wishes.parallel_tool_calls,
        response_format=_format(wishes.text or {}),
        chat_template_kwargs=wishes.chat_template_kwargs,
        reasoning_effort=_effort(wishes.reasoning or {}),
        rid=wishes.rid,
        extra_key=wishes.extra_key,
        cache_salt=wishes.cache_salt,
        priority=wishes.priority,
        timeout=wishes.timeout,
    )


def messages(items: str | list[dict[str, Any]]) -> list[Message]:
    """The input as messages. Raises ApiError naming the item."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    found: list[Message] = []
    for index, item in enumerate(items):
        _add(found, item, f"input[{index}]")
    return found


def _check(wishes: ResponsesBody) -> None:
    if wishes.n not in (None, 1):
        raise invalid("n cannot be honoured: a response has one answer.", "n", "unsupported_parameter")
    if wishes.truncation not in (None, "disabled"):
        text = "truncation cannot be honoured: nothing is cut from a conversation."
        raise invalid(text, "truncation", "unsupported_parameter")
    for index, name in enumerate(wishes.include or ()):
        if name not in INCLUDES:
            raise invalid(f"include[{index}]: {name[:64]!r} cannot be included.", "include", "unsupported_parameter")
    metadata = wishes.metadata or {}
    if len(metadata) > _MOST_METADATA or any(len(k) > 64 or len(v) > 512 for k, v in metadata.items()):
        text = f"metadata holds at most {_MOST_METADATA} pairs of 64 and 512 characters."
        raise invalid(text, "metadata", "out_of_range")


def _add(found: list[Message], item: dict[str, Any], at: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        _add_message(found, item, at)
    elif kind == "function_call":
        name, arguments, call_id = (_text(item, key, at) for key in ("name", "arguments", "call_id"))
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        _assistant(found).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        content = _content(item.get("output"), f"{at}.output")
        found.append({"role": "tool", "tool_call_id": _text(item, "call_id", at), "content": content})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
        thought = "".join(text for text in texts if isinstance(text, str))
        if thought:
            found.append({"role": "assistant", "content": "", "reasoning_content": thought})
    else:
        raise invalid(f"{at}: items of type {str(kind)[:64]!r} are not supported.", f"{at}.type", "invalid_value")


def _add_message(found: list[Message], item: dict[str, Any], at: str) -> None:
    role = item.get("role")
    if role not in ROLES:
        raise invalid(f"{at}.role must be one of {', '.join(ROLES)}.", f"{at}.role", "invalid_value")
    content = _content(item.get("content"), f"{at}.content")
    if role == "assistant":
        message = _assistant(found)
        message["content"] += content
    else:
        found.append({"role": role, "content": content})


def _assistant(found: list[Message]) -> Message:
    """The message of the assistant's turn at hand."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _content(content: Any, at: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{at} must be a string or a list of parts.", at, "invalid_type")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in TEXT_PARTS:
            text = f"{at}[{index}]: parts of type {str(kind)[:64]!r} are not supported; this model takes text only."
            raise invalid(text, f"{at}[{index}]", "invalid_value")
        texts.append(_text(part, "refusal" if kind == "refusal" else "text", f"{at}[{index}]"))
    return "".join(texts)


def _text(item: dict[str, Any], name: str, at: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{at}.{name} must be a string.", f"{at}.{name}", "invalid_type")
    return value


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = str(tool.get("type"))[:64]
        raise invalid(f"{at}.type must be function, not {kind!r}.", f"{at}.type", "invalid_value")
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _format(text: dict[str, Any]) -> dict[str, Any] | None:
    """`text` as chat's response_format."""
    for name, value in text.items():
        if name not in ("format", "verbosity") or (name == "verbosity" and value not in (None, "medium")):
            raise invalid(f"text.{name} cannot be honoured.", f"text.{name}", "unsupported_parameter")
    wished = text.get("format")
    if wished is None:
        return None
    if not isinstance(wished, dict):
        raise invalid("text.format must be an object.", "text.format", "invalid_type")
    if wished.get("type") != "json_schema":
        return wished
    return {"type": "json_schema", "json_schema": {key: value for key, value in wished.items() if key != "type"}}


def _effort(reasoning: dict[str, Any]) -> str | None:
    effort = reasoning.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise invalid("reasoning.effort must be a string.", "reasoning.effort", "invalid_type")
    return effort


def _with_instructions(instructions: str | None, conversation: list[Message]) -> list[Message]:
    """Instructions come first; a system message that follows them is part of the same one."""
    if not instructions:
        return conversation
    if conversation and conversation[0]["role"] in ("system", "developer"):
        first = {"role": "system", "content": f"{instructions}\n\n{conversation[0]['content']}"}
        return [first, *conversation[1:]]
    return [{"role": "system", "content": instructions}, *conversation]
