"""Free text with structured parts: `structural_tag` sources become a Lark grammar with the parts as sub-grammars.

Two published forms are read: {"structures": [{begin, schema, end}], "triggers": [...]} and {"format": {...}} with
the formats const_string, json_schema, regex, grammar, any_text, sequence, or, tag, triggered_tags and
tags_with_separator. Leaves schemas, patterns and grammars to the readers it is given.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from services.scheduler.constraint.canonical import Kind
from services.scheduler.constraint.errors import BadSource

Part = Callable[[Kind, Any], dict[str, Any]]
"""(kind, source) -> one grammar of the engine's list; raises BadSource with a place inside the source."""

_EMBEDDED: dict[str, tuple[Kind, str]] = {
    "json_schema": ("json_schema", "json_schema"),
    "regex": ("regex", "pattern"),
    "grammar": ("ebnf", "grammar"),
}
_TEXT = r"TEXT: /(.|\n)*/"


def structural_tag(source: Any, part: Part, special_id: Callable[[str], int | None]) -> list[dict[str, Any]]:
    """The engine's grammar list. `special_id` knows the strings that are one special token."""
    if not isinstance(source, dict):
        raise BadSource('expected an object with "format", or with "structures" and "triggers"')
    if source.get("type", "structural_tag") != "structural_tag":
        raise BadSource("must be structural_tag", "#/type")
    writer = _Writer(part, special_id)
    if "format" in source:
        body = writer.form(source["format"], "#/format", last=True)
    else:
        body = _in_words_of_structures(writer, _from_structures(source))
    return [{"name": "tags", "lark_grammar": writer.lark(body)}, *writer.parts]


def _in_words_of_structures(writer: _Writer, form: dict[str, Any]) -> str:
    """The expression of `form`; errors name places of the source that it was made from."""
    try:
        return writer.form(form, "#", last=True)
    except BadSource as error:
        place = re.sub(r"^#/tags/(\d+)", r"#/structures/\1", error.place)
        raise BadSource(error.reason, place.replace("/content/json_schema", "/schema", 1)) from None


def _from_structures(source: dict[str, Any]) -> dict[str, Any]:
    tags = []
    for index, structure in enumerate(_list(source, "structures", "#")):
        place = f"#/structures/{index}"
        if not isinstance(structure, dict):
            raise BadSource("expected an object with begin, schema and end", place)
        content = {"type": "json_schema", "json_schema": structure.get("schema", {})}
        begin, end = _string(structure, "begin", place), _string(structure, "end", place)
        tags.append({"type": "tag", "begin": begin, "content": content, "end": end})
    return {"type": "triggered_tags", "triggers": _list(source, "triggers", "#"), "tags": tags}


class _Writer:
    def __init__(self, part: Part, special_id: Callable[[str], int | None]) -> None:
        self.parts: list[dict[str, Any]] = []
        self._part = part
        self._special_id = special_id
        self._lines: list[str] = []
        self._depth = 0

    def lark(self, body: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {body}", *self._lines, _TEXT]) + "\n"

    def form(self, form: Any, place: str, *, last: bool) -> str:
        """The Lark expression of one format. `last`: nothing follows, so free text needs no end."""
        if not isinstance(form, dict) or not isinstance(form.get("type"), str):
            raise BadSource("expected an object with a type", place)
        self._depth += 1
        if self._depth > 16:
            raise BadSource("nested deeper than 16 formats", place)
        writers = {
            "const_string": self._const,
            "json_schema": self._embedded,
            "regex": self._embedded,
            "grammar": self._embedded,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }
        writer = writers.get(form["type"])
        if writer is None:
            raise BadSource(f"{form['type']!r} is no format; the formats are {', '.join(writers)}", f"{place}/type")
        text = writer(form, place, last)
        self._depth -= 1
        return text

    def _const(self, form: dict[str, Any], place: str, last: bool) -> str:
        return self._literal(_string(form, "value", place))

    def _embedded(self, form: dict[str, Any], place: str, last: bool) -> str:
        kind, name = _EMBEDDED[form["type"]]
        if name not in form:
            raise BadSource(f"{name} is missing", place)
        try:
            part = self._part(kind, form[name])
        except BadSource as error:
            raise BadSource(error.reason, _inside(f"{place}/{name}", error.place)) from None
        self.parts.append({"name": f"part{len(self.parts)}", **part})
        return f"@part{len(self.parts) - 1}"

    def _any_text(self, form: dict[str, Any], place: str, last: bool) -> str:
        if not last:
            raise BadSource("free text must come last, or be the content of a tag with an end", place)
        return "TEXT"

    def _sequence(self, form: dict[str, Any], place: str, last: bool) -> str:
        elements = _list(form, "elements", place)
        final = len(elements) - 1
        parts = [self.form(e, f"{place}/elements/{i}", last=last and i == final) for i, e in enumerate(elements)]
        return "(" + " ".join(parts) + ")"

    def _or(self, form: dict[str, Any], place: str, last: bool) -> str:
        elements = _list(form, "elements", place)
        return "(" + " | ".join(self.form(e, f"{place}/elements/{i}", last=last) for i, e in enumerate(elements)) + ")"

    def _tag(self, form: dict[str, Any], place: str, last: bool) -> str:
        begin = _string(form, "begin", place)
        return f"({self._literal(begin)} {self._content(form, place)})"

    def _content(self, tag: dict[str, Any], place: str) -> str:
        """What follows a tag's begin, its end included."""
        content = tag.get("content", {"type": "any_text"})
        end = _string(tag, "end", place)
        if isinstance(content, dict) and content.get("type") == "any_text":
            if not end:
                raise BadSource("free text needs an end here", f"{place}/end")
            return self._until(end)
        return f"{self.form(content, f'{place}/content', last=False)} {self._literal(end)}".rstrip()

    def _triggered(self, form: dict[str, Any], place: str, last: bool) -> str:
        if not last:
            raise BadSource("tags in free text must come last", place)
        triggers = _strings(form, "triggers", place)
        by_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for index, tag in enumerate(_list(form, "tags", place)):
            at = f"{place}/tags/{index}"
            begin = _string(tag, "begin", at)
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise BadSource("begins with none of the triggers", f"{at}/begin")
            rest = begin[len(trigger) :]
            by_trigger[trigger].append(f"{self._literal(rest)} {self._content(tag, at)}".strip())
        tags = [self._trigger(trigger, bodies) for trigger, bodies in by_trigger.items() if bodies]
        tag = "(" + " | ".join(tags) + ")"
        if form.get("stop_after_first"):
            return tag if form.get("at_least_one") else f"({tag} | TEXT)"
        return f"{tag}{'+' if form.get('at_least_one') else '*'} TEXT"

    def _trigger(self, trigger: str, bodies: list[str]) -> str:
        body = "(" + " | ".join(bodies) + ")"
        return f"{self._until(trigger)} {body}"

    def _separated(self, form: dict[str, Any], place: str, last: bool) -> str:
        tags = [self._tag(tag, f"{place}/tags/{i}", False) for i, tag in enumerate(_list(form, "tags", place))]
        tag = "(" + " | ".join(tags) + ")"
        separator = self._literal(_string(form, "separator", place))
        many = tag if form.get("stop_after_first") else f"{tag} ({separator} {tag})*"
        return f"({many})" if form.get("at_least_one") else f"({many})?"

    def _literal(self, text: str) -> str:
        if not text:
            return ""
        special = self._special_id(text)
        return json.dumps(text, ensure_ascii=False) if special is None else f"<[{special}]>"

    def _until(self, mark: str) -> str:
        """Free text up to the first `mark`, with it."""
        if self._special_id(mark) is not None:
            return f"TEXT {self._literal(mark)}"
        name = f"until{len(self._lines)}"
        self._lines.append(f"{name}[lazy]: TEXT {self._literal(mark)}")
        return name


def _inside(outer: str, inner: str) -> str:
    if inner.startswith("#"):
        return outer + inner[1:]
    return f"{outer} ({inner})" if inner else outer


def _string(value: Any, name: str, place: str) -> str:
    if not isinstance(value, dict) or not isinstance(value.get(name), str):
        raise BadSource(f"{name} must be a string", place)
    found: str = value[name]
    if name == "begin" and not found:
        raise BadSource("must not be empty", f"{place}/begin")
    return found


def _list(value: dict[str, Any], name: str, place: str) -> list[Any]:
    found = value.get(name)
    if not isinstance(found, list) or not found:
        raise BadSource(f"{name} must be a list, not empty", place)
    return found


def _strings(value: dict[str, Any], name: str, place: str) -> list[str]:
    found = _list(value, name, place)
    for index, item in enumerate(found):
        if not isinstance(item, str) or not item:
            raise BadSource("must be a string, not empty", f"{place}/{name}/{index}")
    return found
