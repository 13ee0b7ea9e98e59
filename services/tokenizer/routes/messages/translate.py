"""Requests of /v1/messages as conversations: blocks become messages, fields get their names on chat.

Leaves everything behind the messages to conversation.

    user: tool_result, tool_result, text    ->  tool, tool, user
    assistant: thinking, text, tool_use     ->  assistant: reasoning_content, content, tool_calls
    an assistant at the end                 ->  its text is continued
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from services.tokenizer.errors import invalid
from services.tokenizer.routes.messages.fields import Blocks, MessagesBody
from services.tokenizer.schema import ChatBody, SamplingFields

Message = dict[str, Any]
Block = dict[str, Any]
PLACES = (
    (re.compile(r"tools\[(\d+)\]\.function\.parameters"), r"tools[\1].input_schema"),
    (re.compile(r"tools\[(\d+)\]\.function"), r"tools[\1]"),
    (re.compile(r"tool_choice\.function"), "tool_choice"),
    (re.compile(r"^stop\b"), "stop_sequences"),
    (re.compile(r"reasoning_effort"), "output_config.effort"),
    (re.compile(r"response_format\.json_schema|response_format"), "output_config.format"),
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = ("enabled", "disabled", "adaptive")


def chat_body(wishes: MessagesBody) -> ChatBody:
    """The same wishes as a chat. Raises ApiError."""
    if wishes.n not in (None, 1):
        raise invalid("n cannot be honoured: a message has one answer.", "n", "unsupported_parameter")
    sampling = {name: getattr(wishes, name) for name in SamplingFields.__struct_fields__}
    sampling["stop"] = wishes.stop_sequences
    conversation = messages(wishes)
    choice = wishes.tool_choice or {}
    return ChatBody(
        **sampling,
        messages=conversation,
        continue_final_message=conversation[-1]["role"] == "assistant" and "tool_calls" not in conversation[-1],
        model=wishes.model,
        stream=wishes.stream,
        tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(wishes.tools or ())],
        tool_choice=_choice(choice),
        parallel_tool_calls=not choice.get("disable_parallel_tool_use"),
        response_format=_format(wishes),
        chat_template_kwargs=_template_kwargs(wishes),
        reasoning_effort=_effort(wishes.output_config or {}),
        rid=wishes.rid,
        extra_key=wishes.extra_key,
        cache_salt=wishes.cache_salt,
        priority=wishes.priority,
        timeout=wishes.timeout,
    )


def messages(wishes: MessagesBody) -> list[Message]:
    """System and turns as chat messages. Raises ApiError naming the block."""
    found: list[Message] = []
    if wishes.system:
        found.append({"role": "system", "content": _plain(wishes.system, "system")})
    for index, message in enumerate(wishes.messages):
        role, at = message.get("role"), f"messages[{index}]"
        if role == "user":
            _add_user(found, message.get("content"), f"{at}.content")
        elif role == "assistant":
            found.append(_assistant(message.get("content"), f"{at}.content"))
        elif role == "system":
            found.append({"role": "system", "content": _plain(message.get("content"), f"{at}.content")})
        else:
            raise invalid(f"{at}.role must be user or assistant.", f"{at}.role", "invalid_value")
    if not wishes.messages:
        raise invalid("messages is empty.", "messages", "empty_prompt")
    return found


def _add_user(found: list[Message], content: Any, at: str) -> None:
    texts = []
    for block, place in _blocks(content, at):
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(block, "text", place))
        elif kind == "tool_result":
            result = block.get("content")
            text = _plain(result, f"{place}.content") if result is not None else ""
            found.append({"role": "tool", "tool_call_id": _text(block, "tool_use_id", place), "content": text})
        else:
            raise _unsupported(kind, place)
    if texts or not isinstance(content, list) or not content:
        found.append({"role": "user", "content": "".join(texts)})


def _assistant(content: Any, at: str) -> Message:
    texts, thoughts, calls = [], [], []
    for block, place in _blocks(content, at):
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(block, "text", place))
        elif kind == "thinking":
            thoughts.append(_text(block, "thinking", place))
        elif kind == "tool_use":
            arguments = msgspec.json.encode(block.get("input") or {}).decode()
            function = {"name": _text(block, "name", place), "arguments": arguments}
            calls.append({"id": _text(block, "id", place), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise _unsupported(kind, place)
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _blocks(content: Any, at: str) -> list[tuple[Block, str]]:
    if isinstance(content, str):
        return [({"type": "text", "text": content}, at)]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise invalid(f"{at} must be a string or a list of blocks.", at, "invalid_type")
    return [(block, f"{at}[{index}]") for index, block in enumerate(content)]


def _plain(content: Blocks | Any, at: str) -> str:
    """Text blocks only."""
    texts = []
    for block, place in _blocks(content, at):
        if block.get("type") != "text":
            raise _unsupported(block.get("type"), place)
        texts.append(_text(block, "text", place))
    return "".join(texts)


def _text(block: Block, name: str, at: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid(f"{at}.{name} must be a string.", f"{at}.{name}", "invalid_type")
    return value


def _unsupported(kind: Any, at: str) -> Exception:
    text = f"{at}: blocks of type {str(kind)[:64]!r} are not supported here; this model takes text only."
    return invalid(text, at, "invalid_value")


def _tool(tool: dict[str, Any], at: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        kind = str(tool["type"])[:64]
        raise invalid(f"{at}.type must be custom, not {kind!r}: tools are run by the client.", f"{at}.type")
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _choice(choice: dict[str, Any]) -> str | dict[str, Any] | None:
    kind = choice.get("type")
    if not choice:
        return None
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise invalid("tool_choice.type must be auto, any, tool or none.", "tool_choice.type", "invalid_value")
    return _CHOICES[kind]


def _format(wishes: MessagesBody) -> dict[str, Any] | None:
    wished = wishes.output_format or (wishes.output_config or {}).get("format")
    if wished is None:
        return None
    if not isinstance(wished, dict) or wished.get("type") != "json_schema":
        at = "output_config.format"
        raise invalid(f"{at}.type must be json_schema.", f"{at}.type", "invalid_value")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wished.get("schema")}}


def _template_kwargs(wishes: MessagesBody) -> dict[str, Any] | None:
    """Thinking in the words of chat templates."""
    kwargs: dict[str, Any] = {}
    if wishes.thinking is not None:
        kind = wishes.thinking.get("type")
        if kind not in _THINKING:
            text = f"thinking.type must be one of {', '.join(_THINKING)}."
            raise invalid(text, "thinking.type", "invalid_value")
        kwargs = {"enable_thinking": kind != "disabled", "thinking": kind != "disabled"}
    return {**kwargs, **(wishes.chat_template_kwargs or {})}


def _effort(config: dict[str, Any]) -> str | None:
    effort = config.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise invalid("output_config.effort must be a string.", "output_config.effort", "invalid_type")
    return effort
