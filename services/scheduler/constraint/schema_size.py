"""How much one token can add to the shortest completion of a JSON document: the largest optional part of its schema.

Choosing an optional property, one more array item or another branch obliges the text to finish that part. The
sizes are in bytes, which no tokenizer exceeds in tokens. Leaves the exact length of a completion to the search.
"""

from __future__ import annotations

from typing import Any

_MANY = 100
_UNKNOWN = 40  # a text behind a pattern or a format
_SHORTEST = {"string": 2, "object": 2, "array": 2, "number": 1, "integer": 1, "boolean": 4, "null": 4}
_ESCAPES = 8  # a character begun, an escape begun, a number's sign or exponent


def largest_step(schema: Any, most_depth: int) -> int:
    """Tokens by which one sampled token can lengthen the shortest completion, twice the largest part and a bit."""
    sizes = _Sizes(schema, most_depth)
    sizes.of(schema, 0)
    return 2 * sizes.largest + _ESCAPES


def has_hidden_obligations(schema: Any) -> bool:
    """A pattern, or one of many texts, may ask for more after any character: no token of it is harmless unseen."""
    todo = [schema]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            if "pattern" in value or "patternProperties" in value:
                return True
            if len(value.get("enum", ())) > _MANY:
                return True
            todo += value.values()
        elif isinstance(value, list):
            todo += value
    return False


class _Sizes:
    def __init__(self, root: Any, most_depth: int) -> None:
        self.largest = 2
        self._root = root
        self._most_depth = most_depth
        self._open: set[int] = set()
        self._known: dict[int, int] = {}

    def of(self, schema: Any, depth: int) -> int:
        """Bytes of a small value of `schema`; notes every optional part inside."""
        if not isinstance(schema, dict) or depth > self._most_depth or id(schema) in self._open:
            return 2
        known = self._known.get(id(schema))
        if known is None:
            self._open.add(id(schema))
            known = self._known[id(schema)] = self._sum(schema, depth + 1)
            self._open.discard(id(schema))
        return known

    def _sum(self, schema: dict[str, Any], depth: int) -> int:
        size = self._scalar(schema)
        names = schema.get("type", ("object", "array"))
        types = names if isinstance(names, list | tuple) else (names,)
        parts = [self._object(schema, depth)] if "object" in types else []
        parts += [self._array(schema, depth)] if "array" in types else []
        size += sum(parts)
        if len(types) > 1:  # to begin one of them is a choice
            self._optional(max(size, *parts) if parts else size)
        for name in ("allOf", "$ref"):
            for inner in self._listed(schema, name):
                size += self.of(inner, depth)
        for name in ("anyOf", "oneOf"):
            sizes = [self.of(inner, depth) for inner in self._listed(schema, name)]
            for branch in sizes:
                self._optional(branch)
            size += min(sizes, default=0)
        return size

    def _scalar(self, schema: dict[str, Any]) -> int:
        values = schema.get("enum", [schema["const"]] if "const" in schema else [])
        for value in values:
            self._optional(len(repr(value).encode("utf-8", "replace")) + 8)
        names = schema.get("type", "string")
        types = names if isinstance(names, list) else [names]
        size = min((_SHORTEST.get(name, 2) for name in types if isinstance(name, str)), default=2)
        if values:
            size = min(len(repr(value)) for value in values)
        if "pattern" in schema or "format" in schema:
            size += _UNKNOWN
            self._optional(_UNKNOWN)
        least = schema.get("minLength", 0)
        return size + (int(least) if isinstance(least, int | float) else 0)

    def _object(self, schema: dict[str, Any], depth: int) -> int:
        required = schema.get("required", ())
        names = set(required) if isinstance(required, list | tuple) else set()
        properties = schema.get("properties", {})
        size = 0
        for name, inner in properties.items():
            part = len(name.encode("utf-8", "replace")) + 4 + self.of(inner, depth)
            if name in names:
                size += part  # every completion has it: its name obliges to nothing new
            else:
                self._optional(part)
        size += sum(len(name) + 6 for name in names if name not in properties)
        others = (schema.get("additionalProperties"), *schema.get("patternProperties", {}).values())
        open_sizes = [_UNKNOWN // 4 + self.of(inner, depth) for inner in others if inner is not False]
        for part in open_sizes:
            self._optional(part)
        return size + (max(open_sizes, default=0) if schema.get("minProperties", 0) > len(names) else 0)

    def _array(self, schema: dict[str, Any], depth: int) -> int:
        items = schema.get("items", schema.get("prefixItems"))
        inner = [self.of(item, depth) + 1 for item in (items if isinstance(items, list) else [items])]
        inner += [self.of(item, depth) + 1 for item in schema.get("prefixItems", ())]
        largest = max(inner, default=0)
        self._optional(largest)
        least = schema.get("minItems", 0)
        return min(int(least), 1 << 20) * largest if isinstance(least, int | float) else 0

    def _listed(self, schema: dict[str, Any], name: str) -> list[Any]:
        value = schema.get(name, ())
        if name != "$ref":
            return list(value)
        if not isinstance(value, str) or not value.startswith("#/"):
            return []
        target = self._root
        for part in value[2:].split("/"):
            name = part.replace("~1", "/").replace("~0", "~")
            target = target[int(name)] if isinstance(target, list) else target.get(name, {})
        return [target]

    def _optional(self, size: int) -> None:
        self.largest = max(self.largest, size)
