"""The input of a stored response as a list in pages, the last item first unless asked otherwise.

Leaves the store to its desk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.tokenizer import validation
from services.tokenizer.errors import invalid

MOST = 100


def refuse_replay(query: Mapping[str, str]) -> None:
    """400 for a stored response as a stream: its events are not kept."""
    for name in ("stream", "starting_after"):
        if query.get(name, "false").lower() not in ("", "false", "0"):
            raise invalid(f"{name} cannot be honoured: events are not kept.", name, "unsupported_parameter")


def page(given: str | list[dict[str, Any]], response_id: str, query: Mapping[str, str]) -> dict[str, Any]:
    """At most `limit` items (all without) behind the item `after`. Raises ApiError for what is no such wish."""
    listed = [{"role": "user", "content": given}] if isinstance(given, str) else given
    items = [_whole(item, f"in_{index}_{response_id}") for index, item in enumerate(listed)]
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order must be asc or desc.", "order", "invalid_value")
    if order == "desc":
        items.reverse()
    after = query.get("after")
    if after:
        place = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise invalid(f"There is no item {after[:128]!r}.", "after", "invalid_value")
        items = items[place + 1 :]
    shown = items[: _limit(query.get("limit"))]
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return {"object": "list", "data": shown, "has_more": len(shown) < len(items), **ends}


def _whole(item: dict[str, Any], item_id: str) -> dict[str, Any]:
    """An item with what clients may leave out: id and kind, a message's status and the parts that its text is."""
    whole = {"id": item_id, "type": "message", **item}
    if whole["type"] == "message":
        whole.setdefault("status", "completed")
        if isinstance(whole.get("content"), str):
            kind = "output_text" if whole.get("role") == "assistant" else "input_text"
            whole["content"] = [{"type": kind, "text": whole["content"]}]
    return whole


def _limit(value: str | None) -> int | None:
    if value is None:
        return None
    if not value.isascii() or not value.isdigit():
        raise invalid(f"limit must be a number from 1 to {MOST}.", "limit", "invalid_type")
    return validation.in_range("limit", int(value[:9]), 1, MOST)
