"""Reads server-sent events for tests, as strictly as the format allows."""

from __future__ import annotations

import json
from typing import Any


def events(text: str) -> list[Any]:
    """The JSON of every event; the last one must be [DONE]. Comments are skipped."""
    data: list[str] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        assert "\n" not in block, f"an event of several lines: {block!r}"
        if not block.startswith(":"):
            assert block.startswith("data: "), block
            data.append(block.removeprefix("data: "))
    assert data, text
    assert data[-1] == "[DONE]"
    assert "[DONE]" not in data[:-1]
    return [json.loads(line) for line in data[:-1]]
