"""The ways models write calls, by name. Leaves each way to its own module."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import msgspec

from services.tokenizer.tools import emitter, grammars, hermes, llama3, mistral
from services.tokenizer.tools.definitions import Toolbox
from services.tokenizer.tools.emitter import Emitter
from services.tokenizer.tools.hermes import HermesParser
from services.tokenizer.tools.llama3 import Llama3Parser
from services.tokenizer.tools.mistral import MistralParser
from services.tokenizer.tools.pythonic import PythonicParser

Call = dict[str, Any]
"""One entry of an assistant message's tool_calls."""


class Parser(Protocol):
    """Reads one answer in any pieces; what it finds goes to the emitter it was given."""

    def feed(self, text: str) -> None: ...

    def finish(self) -> None: ...


class Format(msgspec.Struct, frozen=True):
    """One way. `marks`: texts that may be special tokens and must stay in the answer's text."""

    name: str
    marks: tuple[str, ...]
    parser: Callable[[Collection[str], Emitter], Parser]
    form: Callable[[Toolbox, dict[str, Any] | None], dict[str, Any]]
    write: Callable[[Sequence[Call]], str]  # calls of the history, for templates that know none
    new_id: Callable[[], str] = emitter.long_id


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"{hermes.BEGIN}\n{_object(call, 'arguments')}\n{hermes.END}" for call in calls)


def _llama3(calls: Sequence[Call]) -> str:
    return "; ".join(_object(call, "parameters") for call in calls)


def _mistral(calls: Sequence[Call]) -> str:
    return f"{mistral.MARK}[{', '.join(_object(call, 'arguments') for call in calls)}]"


def _pythonic(calls: Sequence[Call]) -> str:
    return f"[{', '.join(map(_expression, calls))}]"


def _object(call: Call, key: str) -> str:
    function = call["function"]
    return json.dumps({"name": function["name"], key: function.get("arguments", {})}, ensure_ascii=False)


def _expression(call: Call) -> str:
    function = call["function"]
    arguments = function.get("arguments", {})
    named = arguments.items() if isinstance(arguments, dict) else ()
    return f"{function['name']}({', '.join(f'{name}={value!r}' for name, value in named)})"


HERMES = Format("hermes", (hermes.BEGIN, hermes.END), HermesParser, grammars.hermes_form, _hermes)
LLAMA3 = Format("llama3", (llama3.TAG,), Llama3Parser, grammars.llama3_form, _llama3)
MISTRAL = Format("mistral", (mistral.MARK,), MistralParser, grammars.mistral_list_form, _mistral, emitter.short_id)
MISTRAL_ARGS = msgspec.structs.replace(
    MISTRAL, marks=(mistral.MARK, mistral.ARGS, "[CALL_ID]"), form=grammars.mistral_args_form
)
PYTHONIC = Format("pythonic", ("<|python_start|>", "<|python_end|>"), PythonicParser, grammars.pythonic_form, _pythonic)
NAMED = {
    **dict.fromkeys(("hermes", "qwen", "qwen25", "qwen3"), HERMES),
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
}


def choose(name: str, template: str) -> Format:
    """The format of that name; for `auto` the one whose marks the chat template writes, else hermes."""
    if name == "mistral" or (name == "auto" and mistral.MARK in template):
        return MISTRAL_ARGS if mistral.ARGS in template else MISTRAL
    if name != "auto":
        return NAMED[name]
    if hermes.BEGIN in template:
        return HERMES
    if "<|python_start|>" in template:
        return PYTHONIC
    return LLAMA3 if llama3.TAG in template or '"parameters": ' in template else HERMES
