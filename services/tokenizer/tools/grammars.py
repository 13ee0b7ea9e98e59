"""Grammars that hold calls to their tools: `structural_tag` sources in the frame of each format.

`required`: nothing but calls. `auto`: free text, in which whatever begins as a call becomes a valid one. Where the
answer has a schema of its own, the text is either that or calls. Leaves compiling to the scheduler.
"""

from __future__ import annotations

import json
from typing import Any

from services.tokenizer.tools import hermes, llama3, mistral, pythonic_grammar, schemas
from services.tokenizer.tools.definitions import Tool, Toolbox

Form = dict[str, Any]
_ANY_TEXT: Form = {"type": "any_text"}
_BLANKS_IN_CLASS = r" \t\r\n"
_BLANK = f"[{_BLANKS_IN_CLASS}]"


def hermes_form(box: Toolbox, answer: Form | None) -> Form:
    tags = [_framed(hermes.BEGIN, _object("\n", tool, "arguments", "\n"), hermes.END) for tool in box.allowed]
    return _tagged(box, tags, hermes.BEGIN, "\n", answer)


def llama3_form(box: Toolbox, answer: Form | None) -> Form:
    tags = [_framed(_head(tool, "parameters"), _schema(tool), "}") for tool in box.allowed]
    calls = _several(tags, llama3.BETWEEN + " ", box.parallel)
    if box.mode == "required":
        return calls
    tagged = _sequence(_const(llama3.TAG), calls)
    if answer is not None:
        return _or(tagged, answer)  # a bare object would begin as the answer does
    return _or(calls, tagged, _regex(not_beginning_with(('{ "name"', llama3.TAG))))


def mistral_list_form(box: Toolbox, answer: Form | None) -> Form:
    tags = [_framed(_head(tool, "arguments"), _schema(tool), "}") for tool in box.allowed]
    content = _sequence(_const("["), _several(tags, ", ", box.parallel))
    one = Toolbox(box.defined, box.allowed, box.mode, False)
    return _tagged(one, [_framed(mistral.MARK, content, "]")], mistral.MARK, "", answer)


def mistral_args_form(box: Toolbox, answer: Form | None) -> Form:
    tags = [
        _framed(mistral.MARK, _sequence(_const(tool.name), _const(mistral.ARGS), _schema(tool)), "")
        for tool in box.allowed
    ]
    return _tagged(box, tags, mistral.MARK, "", answer)


def pythonic_form(box: Toolbox, answer: Form | None) -> Form:
    calls: Form = {"type": "grammar", "grammar": pythonic_grammar.calls(box.allowed, box.parallel)}
    return calls if box.mode == "required" else _or(calls, answer or _regex(_NO_PYTHON_CALL))


def not_beginning_with(beginnings: tuple[str, ...]) -> str:
    """A pattern for all texts but those that begin so, blanks apart; a blank inside stands for any number of them."""
    return _other([f" {text}" for text in beginnings])


def _other(beginnings: list[str]) -> str:
    """Texts that leave every one of these paths before its end."""
    skip = any(text.startswith(" ") for text in beginnings)
    paths = [text.lstrip(" ") for text in beginnings]
    first = sorted({text[0] for text in paths})
    excluded = "".join(map(_in_class, first)) + (_BLANKS_IN_CLASS if skip else "")
    ways = [f"[^{excluded}](?:.|\\n)*"]
    for character in first:
        rest = [text[1:] for text in paths if text[0] == character]
        if all(rest):
            ways.append(f"[{_in_class(character)}]{_other(rest)}")
    blanks = f"{_BLANK}*" if skip else ""
    return f"{blanks}(?:{'|'.join(ways)})?"


def _in_class(character: str) -> str:
    return f"\\{character}" if character in "\\]^-[" else character


_NO_PYTHON_CALL = (
    f"{_BLANK}*(?:[^\\[ \\t\\r\\n](?:.|\\n)*"
    f"|\\[{_BLANK}*(?:[^A-Za-z0-9_.\\- \\t\\r\\n](?:.|\\n)*|[A-Za-z0-9_.\\-]+(?:[^A-Za-z0-9_.\\-(](?:.|\\n)*)?)?)?"
)


def _tagged(box: Toolbox, tags: list[Form], trigger: str, separator: str, answer: Form | None) -> Form:
    """Formats in which a mark of its own begins every call."""
    if box.mode == "required" or answer is not None:
        calls = _several(tags, separator, box.parallel)
        return calls if box.mode == "required" or answer is None else _or(calls, answer)
    return {"type": "triggered_tags", "triggers": [trigger], "tags": tags, "stop_after_first": not box.parallel}


def _several(tags: list[Form], separator: str, many: bool) -> Form:
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not many,
    }


def _framed(begin: str, content: Form, end: str) -> Form:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _object(before: str, tool: Tool, key: str, after: str) -> Form:
    return _sequence(_const(before + _head(tool, key)), _schema(tool), _const("}" + after))


def _head(tool: Tool, key: str) -> str:
    return f'{{"name": {json.dumps(tool.name)}, "{key}": '


def _schema(tool: Tool) -> Form:
    return {"type": "json_schema", "json_schema": schemas.arguments(tool)}


def _const(text: str) -> Form:
    return {"type": "const_string", "value": text}


def _regex(pattern: str) -> Form:
    return {"type": "regex", "pattern": pattern}


def _sequence(*elements: Form) -> Form:
    return {"type": "sequence", "elements": list(elements)}


def _or(*elements: Form) -> Form:
    return {"type": "or", "elements": list(elements)}
