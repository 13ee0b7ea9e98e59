"""Tells a model of its tools where the chat template does not: a system text, and a history in plain words.

Leaves templates that know tools to themselves.
"""

from __future__ import annotations

import json
from typing import Any

from services.tokenizer.tools.definitions import Toolbox
from services.tokenizer.tools.formats import Format

Message = dict[str, Any]
_EXAMPLE = {"function": {"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}}


def system_text(box: Toolbox, form: Format) -> str:
    """What the tools are and how to call them."""
    lines = [json.dumps(tool.definition()["function"], ensure_ascii=False) for tool in box.defined]
    several = "You may make several calls, one after the other." if box.parallel else "Make one call at a time."
    need = (
        "Answer with a call."
        if box.mode == "required"
        else "Call a tool when it helps; otherwise answer in plain text."
    )
    return "\n".join(
        (
            "You can call tools. Each line describes one, its parameters as a JSON schema:",
            "<tools>",
            *lines,
            "</tools>",
            "A call is written exactly so:",
            form.write([_EXAMPLE]),
            f"{need} {several} Results come back between <tool_response> and </tool_response>.",
        )
    )


def with_system(messages: list[Message], text: str) -> list[Message]:
    """The text at the end of the system message, or in a new one."""
    if messages and messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}".lstrip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def has_calls(message: Message) -> bool:
    return bool(message.get("tool_calls"))


def with_text_arguments(message: Message) -> Message:
    """Arguments as JSON text: some templates join them to other texts."""
    if not has_calls(message):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function.get("arguments", {})
        if not isinstance(arguments, str):
            function = {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def without_developer(messages: list[Message]) -> list[Message]:
    """The role `developer` as `system`."""
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def plain_history(messages: list[Message], form: Format) -> list[Message]:
    """Calls as the assistant's own words, results as the user's; results of one turn are one message."""
    plain: list[Message] = []
    results = False
    for message in messages:
        if message["role"] in ("tool", "function"):
            text = f"<tool_response>\n{message['content']}\n</tool_response>"
            if results:
                plain[-1] = {**plain[-1], "content": f"{plain[-1]['content']}\n{text}"}
            else:
                plain.append({"role": "user", "content": text})
            results = True
            continue
        results = False
        calls = message.get("tool_calls")
        if calls:
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            message = {**rest, "content": "\n".join(filter(None, (message["content"], form.write(calls))))}
        plain.append(message)
    return plain
