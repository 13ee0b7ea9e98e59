"""XML by grammar: element names and text patterns become a Lark grammar. Leaves compiling it to the compiler.

    xml_schema("person", {"name": None, "age": r"[0-9]{1,3}", "phones": [{"phone": r"[0-9-]+"}]})

accepts `<person><name>...</name><age>...</age><phones><phone>...</phone>...</phones></person>`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Content: TypeAlias = "str | Mapping[str, Content] | Sequence[Mapping[str, Content]] | None"
"""A pattern for the text; None for any text; elements in order; [elements] for any number of rounds of them."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9._-]*")
_TEXT = r"/([^<&]|&(lt|gt|amp|quot|apos|#[0-9]{1,7});)*/"
"""What XML allows as text: a pattern is met inside of it, so `.*` can never open a tag."""


def xml_schema(root: str, content: Content) -> str:
    """A Lark grammar for one XML document without white space between its elements. Raises ValueError."""
    terminals: list[str] = []
    body = _element(root, content, terminals)
    return "\n".join([f"start: {body}", f"TEXT: {_TEXT}", *terminals]) + "\n"


def _element(name: str, content: Content, terminals: list[str]) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of an XML element")
    return f'"<{name}>" {_content(name, content, terminals)} "</{name}>"'


def _content(name: str, content: Content, terminals: list[str]) -> str:
    if content is None:
        return "TEXT"
    if isinstance(content, str):
        return _pattern(name, content, terminals)
    if isinstance(content, Mapping):
        if not content:
            raise ValueError(f"the element {name} names no elements inside; None stands for any text")
        return " ".join(_element(inner, value, terminals) for inner, value in content.items())
    if len(content) != 1 or not isinstance(content[0], Mapping):
        raise ValueError(f"the list of the element {name} must hold the elements of one round")
    return f"({_content(name, content[0], terminals)})*"


def _pattern(name: str, pattern: str, terminals: list[str]) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"the pattern of the element {name}: {error}") from None
    if "\n" in pattern:
        raise ValueError(f"the pattern of the element {name} holds a line break; write \\n")
    terminal = f"T{len(terminals)}"
    escaped = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], pattern)
    terminals.append(f"{terminal}: /{escaped}/ & TEXT")
    return terminal
