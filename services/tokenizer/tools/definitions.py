"""What a request says of its tools, checked: every error names the field. Leaves formats to the format modules."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from services.tokenizer.errors import invalid
from services.tokenizer.messages import MAX_DEPTH, depth_of

MAX_TOOLS = 128
MAX_TOOLS_BYTES = 192 << 10  # all definitions as JSON: they go into the prompt and into one grammar
MAX_DESCRIPTION = 16 << 10
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class Tool(msgspec.Struct, frozen=True):
    """One function. `strict`: its whole schema is enforced, or the request is refused."""

    name: str
    description: str
    parameters: dict[str, Any]
    strict: bool
    param: str  # where the request defines it

    def definition(self) -> dict[str, Any]:
        """As chat templates read it."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


class Toolbox(msgspec.Struct, frozen=True):
    """The tools of a request. `allowed` may be called, `defined` is what the prompt tells of."""

    defined: tuple[Tool, ...]
    allowed: tuple[Tool, ...]
    mode: Literal["auto", "required"]
    parallel: bool

    def definitions(self) -> list[dict[str, Any]]:
        return [tool.definition() for tool in self.defined]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.allowed)


def read(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None, parallel: bool | None
) -> Toolbox | None:
    """None where nothing may be called. Raises ApiError."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice needs tools.", "tool_choice", "invalid_value")
        return None
    if len(tools) > MAX_TOOLS:
        raise invalid(f"tools holds {len(tools)} entries; at most {MAX_TOOLS} are allowed.", "tools", "out_of_range")
    defined = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    size = len(msgspec.json.encode([tool.definition() for tool in defined]))
    if size > MAX_TOOLS_BYTES:
        raise invalid(f"tools has {size} bytes; at most {MAX_TOOLS_BYTES} are allowed.", "tools", "out_of_range")
    names: set[str] = set()
    for tool in defined:
        if tool.name in names:
            raise invalid(f"{tool.param}.name: {tool.name!r} is there twice.", f"{tool.param}.name", "invalid_value")
        names.add(tool.name)
    return _choose(defined, choice, parallel is not False)


def _choose(defined: tuple[Tool, ...], choice: str | dict[str, Any] | None, parallel: bool) -> Toolbox | None:
    if choice in (None, "auto"):
        return Toolbox(defined, defined, "auto", parallel)
    if choice == "required":
        return Toolbox(defined, defined, "required", parallel)
    if choice == "none":
        return None
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return _allowed(defined, choice.get("allowed_tools", choice), parallel)
    name = _named(choice, "tool_choice")
    return Toolbox(defined, (_find(defined, name, "tool_choice.function.name"),), "required", False)


def _allowed(defined: tuple[Tool, ...], wishes: Any, parallel: bool) -> Toolbox:
    at = "tool_choice.allowed_tools"
    mode = wishes.get("mode") if isinstance(wishes, dict) else None
    entries = wishes.get("tools") if isinstance(wishes, dict) else None
    if mode not in ("auto", "required") or not isinstance(entries, list) or not entries:
        raise invalid(f"{at} needs a mode (auto or required) and tools.", at, "invalid_value")
    allowed = tuple(_find(defined, _named(entry, f"{at}.tools"), f"{at}.tools") for entry in entries)
    return Toolbox(defined, allowed, mode, parallel)


def _named(choice: Any, at: str) -> str:
    """The name in {"type": "function", "function": {"name": ...}}."""
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    is_function = isinstance(choice, dict) and choice.get("type", "function") == "function"
    name = function.get("name") if isinstance(function, dict) and is_function else None
    if not isinstance(name, str):
        raise invalid(f"{at} must be none, auto, required or name a function.", at, "invalid_value")
    return name


def _find(defined: tuple[Tool, ...], name: str, at: str) -> Tool:
    found = next((tool for tool in defined if tool.name == name), None)
    if found is None:
        raise invalid(f"{at}: there is no tool {name[:64]!r}.", at, "invalid_value")
    return found


def _tool(tool: dict[str, Any], at: str) -> Tool:
    kind = tool.get("type")
    if kind != "function":
        raise invalid(f"{at}.type must be function, not {str(kind)[:40]!r}.", f"{at}.type", "invalid_value")
    function, at = tool.get("function"), f"{at}.function"
    if not isinstance(function, dict):
        raise invalid(f"{at} must be an object.", at, "missing_required_parameter")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        text = f"{at}.name must be 1 to 64 letters, digits, '_', '-' or '.'."
        raise invalid(text, f"{at}.name", "invalid_value")
    description = function.get("description") or ""
    if not isinstance(description, str) or len(description) > MAX_DESCRIPTION:
        text = f"{at}.description must be a string of at most {MAX_DESCRIPTION} characters."
        raise invalid(text, f"{at}.description", "invalid_value")
    strict = function.get("strict")
    if strict not in (None, True, False):
        raise invalid(f"{at}.strict must be true or false.", f"{at}.strict", "invalid_type")
    return Tool(name, description, _parameters(function.get("parameters"), f"{at}.parameters"), bool(strict), at)


def _parameters(schema: Any, at: str) -> dict[str, Any]:
    if schema is None or schema == {}:
        return NO_PARAMETERS
    if not isinstance(schema, dict):
        raise invalid(f"{at} must be a JSON schema.", at, "invalid_type")
    if schema.get("type", "object") != "object":
        raise invalid(f"{at}.type must be object: arguments have names.", f"{at}.type", "invalid_value")
    if depth_of(schema) > MAX_DEPTH:
        raise invalid(f"{at} is nested too deeply.", at, "invalid_value")
    return schema
