"""XML by grammar: element names and text patterns become a Lark grammar. Leaves compiling it to the compiler.

    {"person": {"name": null, "age": "[0-9]{1,3}", "phones": [{"phone": "[0-9-]+"}]}}

accepts `<person><name>...</name><age>...</age><phones><phone>...</phone>...</phones></person>`: a pattern for the
text, null for any text, elements in order, [elements] for any number of rounds of them.
"""

from __future__ import annotations

import json
import re
from typing import Any

from services.scheduler.constraint.errors import BadSource
from services.scheduler.constraint.limits import Limits
from services.scheduler.constraint.regex_source import ascii_digits, check_regex

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9._-]*")
_CHARACTER = r"[^<&\x00-\x08\x0b\x0c\x0e-\x1f\x{fffe}\x{ffff}]"
_TEXT = rf"/({_CHARACTER}|&(lt|gt|amp|quot|apos);)*/ & ~/(.|\n)*\]\]>(.|\n)*/"
"""What XML allows as text: a pattern is met inside of it, so `.*` can never open a tag."""


def xml_schema(source: Any, limits: Limits) -> tuple[str, list[str]]:
    """A Lark grammar for one XML document without white space between its elements, and its terminals' places.

    `source` names the root element. Raises BadSource with a JSON pointer.
    """
    if not isinstance(source, dict) or len(source) != 1:
        raise BadSource("must be an object with one member, the root element")
    writer = _Writer(limits)
    body = writer.elements(source, "#", 0)
    return "\n".join([f"start: {body}", f"TEXT: {_TEXT}", *writer.terminals]) + "\n", writer.places


class _Writer:
    """`places[i]` is where the pattern of terminal Ti stands."""

    def __init__(self, limits: Limits) -> None:
        self.terminals: list[str] = []
        self.places: list[str] = []
        self._limits = limits
        self._count = 0

    def elements(self, source: dict[str, Any], place: str, depth: int) -> str:
        if not source:
            raise BadSource("names no elements; null stands for any text", place)
        if depth >= self._limits.depth:
            raise BadSource(f"nested deeper than {self._limits.depth} elements", place)
        return " ".join(self._element(name, value, f"{place}/{name}", depth) for name, value in source.items())

    def _element(self, name: str, content: Any, place: str, depth: int) -> str:
        self._count += 1
        if self._count > self._limits.schema_nodes:
            raise BadSource(f"more than {self._limits.schema_nodes} elements", place)
        if not _NAME.fullmatch(name):
            raise BadSource(f"{name[:60]!r} is no name of an XML element", place)
        begin, end = json.dumps(f"<{name}>"), json.dumps(f"</{name}>")
        return f"{begin} {self._content(content, place, depth)} {end}"

    def _content(self, content: Any, place: str, depth: int) -> str:
        if content is None:
            return "TEXT"
        if isinstance(content, str):
            return self._pattern(content, place)
        if isinstance(content, dict):
            return self.elements(content, place, depth + 1)
        if isinstance(content, list) and len(content) == 1 and isinstance(content[0], dict):
            return f"({self.elements(content[0], f'{place}/0', depth + 1)})*"
        raise BadSource("must be a pattern, null, elements, or a list with the elements of one round", place)

    def _pattern(self, pattern: str, place: str) -> str:
        try:
            check_regex(pattern, self._limits)
        except BadSource as bad:
            raise BadSource(bad.reason, f"{place} ({bad.place})" if bad.place else place) from None
        if "\n" in pattern:
            raise BadSource("a pattern must not hold a line break; write \\n", place)
        terminal = f"T{len(self.terminals)}"
        escaped = re.sub(r"\\.|/", lambda found: "\\/" if found[0] == "/" else found[0], ascii_digits(pattern))
        self.terminals.append(f"{terminal}: /{escaped}/ & TEXT")
        self.places.append(place)
        return terminal
