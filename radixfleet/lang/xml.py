"""An XML document as a constraint: `gen(xml_schema=xml_schema("person", {...}))`. Leaves the grammar to the server."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Content: TypeAlias = "str | Mapping[str, Content] | Sequence[Mapping[str, Content]] | None"
"""A pattern for the text; None for any text; elements in order; [elements] for any number of rounds of them."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9._-]*")


def xml_schema(root: str, content: Content) -> dict[str, Any]:
    """What a server takes as `xml_schema`: the root element and what it holds, the elements in this order.

        xml_schema("person", {"name": None, "age": "[0-9]{1,3}", "phones": [{"phone": "[0-9-]+"}]})

    Raises ValueError where a name is none or the content is nothing of the above. Patterns are judged by the server.
    """
    return {root: _checked(root, content)}


def _checked(name: str, content: Any) -> Any:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of an XML element")
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        if not content:
            raise ValueError(f"the element {name} names no elements inside; None stands for any text")
        return {inner: _checked(inner, value) for inner, value in content.items()}
    if not isinstance(content, Sequence) or len(content) != 1 or not isinstance(content[0], Mapping):
        raise ValueError(f"the element {name} holds a pattern, None, elements, or a list with those of one round")
    return [_checked(name, content[0])]
