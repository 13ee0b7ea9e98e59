"""Prompts in parts, as token ids: given ids stay as they are, each run of text between them is tokenised as a whole.

A part whose text means only its letters, while the letters are those of a control token, is tokenised by itself.
Leaves tokenising to text and checks to body.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from services.tokenizer.scripts.body import PromptPart
from services.tokenizer.text import TextEngine


class Piece(NamedTuple):
    """Text that has no ids yet."""

    text: str
    literal: bool = False


async def encode_parts(
    engine: TextEngine, parts: Sequence[PromptPart], limit: int, *, templated: bool = False
) -> array[int]:
    """Ids of all parts. Only text that opens a prompt without a template gets the model's own first token."""
    ids = array("i")
    for is_text, group in groupby(parts, lambda part: part.text is not None):
        if not is_text:
            ids.extend(token for part in group for token in part.ids or ())
            continue
        pieces = [Piece(part.text or "", bool(part.literal)) for part in group]
        ids += await encode_run(engine, pieces, limit, opening=not ids and not templated)
    return ids


async def encode_run(engine: TextEngine, pieces: Sequence[Piece], limit: int, *, opening: bool) -> array[int]:
    """Ids of texts that stand next to each other. Raises ApiError where they cannot fit `limit` tokens."""

    async def encode(text: str, *, special: bool, first: bool) -> array[int]:
        return await engine.encode(text, limit, "prompt_parts", parse_special=special, add_special_tokens=first)

    merged = [
        Piece("".join(piece.text for piece in group), literal)
        for literal, group in groupby((piece for piece in pieces if piece.text), lambda piece: piece.literal)
    ]
    if not merged:
        return array("i")
    for piece in merged:
        if piece.literal and engine.has_control_text(piece.text):
            break
    else:
        return await encode("".join(piece.text for piece in merged), special=True, first=opening)
    ids = array("i")
    for index, piece in enumerate(merged):
        ids += await encode(piece.text, special=not piece.literal, first=opening and index == 0)
    return ids
