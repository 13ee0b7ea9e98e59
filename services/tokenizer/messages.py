"""Chat messages in the one form templates see: content is a string, tool arguments are objects, no nulls.

Leaves rendering to chat_template. Lists of text parts are joined without a separator, for every role.
"""

from __future__ import annotations

from typing import Any

import msgspec

from services.tokenizer.errors import invalid

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
MAX_DEPTH = 64


def normalize(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checked copies. Raises ApiError naming the message."""
    if not messages:
        raise invalid("messages is empty.", "messages", "empty_prompt")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: dict[str, Any], at: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise invalid(f"{at}.role must be one of {', '.join(ROLES)}.", f"{at}.role", "invalid_value")
    if depth_of(message) > MAX_DEPTH:
        raise invalid(f"{at} is nested too deeply.", at, "invalid_value")
    clean = {key: value for key, value in message.items() if value is not None}
    if "content" not in clean and role != "assistant":
        raise invalid(f"{at}.content is required for the role {role!r}.", f"{at}.content", "missing_required_parameter")
    clean["content"] = _content(clean.get("content", ""), f"{at}.content")
    if "tool_calls" in clean:
        clean["tool_calls"] = _tool_calls(clean["tool_calls"], f"{at}.tool_calls")
    return clean


def _content(content: Any, at: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{at} must be a string or a list of parts.", at, "invalid_type")
    return "".join(_part(part, f"{at}[{index}]") for index, part in enumerate(content))


def _part(part: Any, at: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in TEXT_PARTS:
        raise invalid(
            f"{at}: parts of type {kind!r} are not supported; this model takes text only.", at, "invalid_value"
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise invalid(f"{at}.text must be a string.", f"{at}.text", "invalid_type")
    return text


def _tool_calls(calls: Any, at: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise invalid(f"{at} must be a list of objects.", at, "invalid_type")
    return [_tool_call(call, f"{at}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: dict[str, Any], at: str) -> dict[str, Any]:
    """Arguments come as JSON text on the wire; templates want the object."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"{at}.function must have a name.", f"{at}.function.name", "missing_required_parameter")
    if not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"])
    except (msgspec.DecodeError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def depth_of(value: Any) -> int:
    """Nesting of lists and objects, without recursion of our own."""
    depth, level = 0, [value]
    while level and depth <= MAX_DEPTH:
        depth += 1
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    return depth
