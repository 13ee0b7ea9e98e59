"""Where a generation goes on: its ids without what ended it. Leaves generating to chain."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from services.tokenizer.output import Output
from services.tokenizer.render import finish
from services.tokenizer.text import TextEngine

_BROKEN = "\ufffd"  # how a tokenizer shows bytes that are no character yet


async def continuation(engine: TextEngine, output: Output) -> tuple[Sequence[int], str]:
    """The ids a continuation starts from, and text that follows them.

    A token that ended the answer does not belong to it. A stop string can end in the middle of a token: that token
    was never part of the text, and what remains of its letters is text again.
    """
    matched = finish.matched(output.finish)
    if isinstance(matched, str):
        return await _before(engine, output.token_ids, output.text, matched)
    if matched is not None and output.token_ids[-1:] == array("i", [matched]):
        return output.token_ids[:-1], ""
    return output.token_ids, ""


async def _before(engine: TextEngine, ids: array[int], text: str, stop: str) -> tuple[Sequence[int], str]:
    """The most ids that hold nothing beyond `text`, and the text they lack; looked for from the end."""
    window = min(len(ids), len(stop.encode()) + 4)
    for first in dict.fromkeys((len(ids) - window, 0)):
        for end in range(len(ids), first - 1, -1):
            part = await engine.decode(ids[:end]) if end else ""
            if text.startswith(" ") and part and not part.startswith(" "):
                part = " " + part  # decoders of some models drop the first blank
            if text.startswith(part) and not part.endswith(_BROKEN):
                return ids[:end], text[len(part) :]
    return ids[:0], text
